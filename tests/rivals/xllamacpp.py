"""Stands in for the package of llama.cpp: a server whose clock says what it is told to."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

__version__ = "0.0"

READ_MS, MADE_MS = 2.0, 5.0  # a token


def CommonParams():
    return SimpleNamespace(
        model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace()
    )


class Server:
    def __init__(self, params):
        print("loading", params.model.path)  # as libraries do, where answers go
        server = HTTPServer(("127.0.0.1", 0), Handler)
        self.listening_address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        read, made = len(asked["prompt"]), asked["n_predict"]
        timings = {
            "prompt_n": read,
            "prompt_ms": read * READ_MS,
            "predicted_n": made,
            "predicted_ms": (made - 1) * MADE_MS,
        }
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"timings": timings}).encode())

    def log_message(self, *_):
        pass
