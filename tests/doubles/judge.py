"""A small OpenAI-compatible server that stands in for a judge: it is right, slow, busy, silent or talks nonsense."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HANG, CLOSE = object(), object()


def status(code, body="no", **headers):
    """A reply that is no text: its status, what it says, and headers (Retry_After="1")."""
    return code, body, {name.replace("_", "-"): value for name, value in headers.items()}


class Cut(str):
    """A text that has ended at a limit of tokens."""


class JudgeDouble:
    """Answers every request with what ``reply(message, number of the request)`` returns: a text, `Cut`, `status`,
    `HANG` or `CLOSE`. ``tokens`` of each request are told; None: not."""

    def __init__(self, reply, tokens=10, models=("grader",)):
        self.requests, self.headers, self.starts, self.paths = [], [], [], []
        self.busy = self.busiest = 0
        self._lock, self._over, double = threading.Lock(), threading.Event(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                double.paths.append(self.path)
                self.send(200, json.dumps({"data": [{"id": model} for model in models]}))

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with double._lock:
                    double.requests.append(request)
                    double.headers.append(dict(self.headers))
                    double.paths.append(self.path)
                    double.starts.append(time.monotonic())
                    double.busy += 1
                    double.busiest = max(double.busiest, double.busy)
                    number = len(double.requests)
                told = reply(double.messages[number - 1], number)
                if told is HANG:
                    double._over.wait(20)
                with double._lock:
                    double.busy -= 1
                if told in (HANG, CLOSE):
                    self.close_connection = True
                elif isinstance(told, tuple):
                    self.send(*told)
                else:
                    usage = {} if tokens is None else {"usage": {"total_tokens": tokens}}
                    choice = {"message": {"role": "assistant", "content": told}, "finish_reason": "stop"}
                    if isinstance(told, Cut):
                        choice["finish_reason"] = "length"
                    self.send(200, json.dumps({"choices": [choice]} | usage))

            def send(self, code, body, headers=None):
                self.send_response(code)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body.encode())))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_):
                pass

            def handle(self):
                with contextlib.suppress(OSError):  # whoever asked has given up
                    super().handle()

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def messages(self):
        """The texts of the requests, without images."""
        contents = [request["messages"][-1]["content"] for request in self.requests]
        return [content if isinstance(content, str) else content[-1]["text"] for content in contents]

    def close(self):
        self._over.set()
        self._http.shutdown()
        self._http.server_close()
