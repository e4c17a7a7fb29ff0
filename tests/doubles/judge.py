"""A small HTTP server that replaces a judge or a scorer: it replies correctly, is busy, silent or slow, or sends
garbage."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.clock import PATIENCE_S

HANG, CLOSE = object(), object()


def status(code, body="no", **headers):
    """A reply with an HTTP status, a body and headers (Retry_After="1") instead of a text."""
    return code, body, {name.replace("_", "-"): value for name, value in headers.items()}


class Cut(str):
    """A text that was truncated at a token limit."""


class Double:
    """Sends ``reply(request, number of the request)`` to every request: `status`, `HANG` or `CLOSE`. The body may be an
    iterator of parts."""

    path = "/score"

    def __init__(self, reply, keep=True):
        self.requests, self.headers, self.paths, self.num_connections = [], [], [], 0
        self.busy = self.busiest = 0
        lock, over, double = threading.Lock(), threading.Event(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1" if keep else "HTTP/1.0"

            def setup(self):
                double.num_connections += 1
                super().setup()

            def do_GET(self):
                double.paths.append(self.path)
                self.send(*double.got())

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    double.requests.append(request)
                    double.headers.append(dict(self.headers))
                    double.paths.append(self.path)
                    double.busy += 1
                    double.busiest = max(double.busiest, double.busy)
                    number = len(double.requests)
                told = reply(request, number)
                if told is HANG:
                    over.wait(PATIENCE_S)
                with lock:
                    double.busy -= 1
                if told in (HANG, CLOSE):
                    self.close_connection = True
                else:
                    self.send(*told)

            def send(self, code, body, headers=None):
                self.send_response(code)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                body = body.encode() if isinstance(body, str) else body
                parts = [body] if isinstance(body, bytes) else body
                self.send_header("Content-Length", str(len(body) if isinstance(body, bytes) else 1 << 20))
                self.end_headers()
                for part in parts:
                    self.wfile.write(part)

            def log_message(self, *_):
                pass

            def handle(self):
                with contextlib.suppress(OSError):  # the client has closed the connection
                    super().handle()

        self._http, self._over = ThreadingHTTPServer(("127.0.0.1", 0), Handler), over
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}{self.path}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self):
        self._over.set()
        self._http.shutdown()
        self._http.server_close()


class JudgeDouble(Double):
    """OpenAI-compatible server: ``reply(message, number of the request)`` may also return a text or `Cut`. ``tokens``
    is the usage in each reply; None: no usage."""

    path = "/v1"

    def __init__(self, reply, tokens=10, models=("grader",)):
        self.got = lambda: (200, json.dumps({"data": [{"id": model} for model in models]}))

        def completion(request, number):
            told = reply(text_of(request), number)
            if not isinstance(told, str | None):
                return told
            usage = {} if tokens is None else {"usage": {"total_tokens": tokens}}
            finish = "length" if isinstance(told, Cut) else "stop"
            choice = {"message": {"role": "assistant", "content": told}, "finish_reason": finish}
            return 200, json.dumps({"choices": [choice]} | usage)

        super().__init__(completion)

    @property
    def messages(self):
        """Return the texts of the requests, without images."""
        return [text_of(request) for request in self.requests]


def text_of(request):
    content = request["messages"][-1]["content"]
    return content if isinstance(content, str) else content[-1]["text"]
