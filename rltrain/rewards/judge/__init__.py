"""A model as judge: what it is asked, how its reply is read, and the server behind it. Knows neither slots nor Ray."""
