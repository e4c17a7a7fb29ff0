"""Parts of an update: optimizer steps, token selection, token advantages, and the balance of experts."""
