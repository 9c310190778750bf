"""The applications that the servers run, as source text that each run writes into its folder.

All read their environment: STORE_URL, PREFIX, MODE (the consistency), USED (call the limiter while
the application is imported, so that its connection and its thread are there before a fork).
"""

from __future__ import annotations

_COMMON = """
import os, time
from distwindow import AsyncLimiter, Limiter

def options(**more):
    options = dict(prefix=os.environ["PREFIX"], consistency=os.environ["MODE"], timeout=5)
    options |= dict(name=os.environ["PREFIX"])
    if os.environ["MODE"] != "eventual":
        options["flush_interval"] = 60  # only the end of the process sends the refusals
    return options

def make():
    limiter = Limiter(os.environ["STORE_URL"], "250/hour", **options())
    if "USED" in os.environ:
        limiter.try_acquire("used at import")
    return limiter

def call(limiter):
    began = time.perf_counter()
    allowed = bool(limiter.try_acquire("shared"))
    return allowed, time.perf_counter() - began
"""

WSGI = (
    _COMMON
    + """
limiter = make()

def app(environ, start_response):
    if environ["PATH_INFO"] == "/up":
        time.sleep(0.05)
        status, took = "200 OK", 0.0
    else:
        try:
            allowed, took = call(limiter)
            status = "200 OK" if allowed else "429 Too Many Requests"
        except Exception as exc:
            import traceback; traceback.print_exc()
            status, took = "500 " + type(exc).__name__, 0.0
    body = f"{os.getpid()} {took * 1e6:.1f}".encode()
    start_response(status, [("Content-Length", str(len(body))), ("Connection", "close")])
    return [body]
"""
)

WERKZEUG = (
    WSGI
    + """
if __name__ == "__main__":
    import signal, sys
    from werkzeug.serving import make_server
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
    make_server("127.0.0.1", int(sys.argv[1]), app, threaded=True).serve_forever()
"""
)

ASGI = (
    _COMMON
    + """
import asyncio
limiter = AsyncLimiter(os.environ["STORE_URL"], "250/hour", **options())

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await limiter.aclose()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    if scope["path"] == "/up":
        await asyncio.sleep(0.05)
        status, took = 200, 0.0
    else:
        began = time.perf_counter()
        try:
            status = 200 if await limiter.try_acquire("shared") else 429
        except Exception:
            import traceback; traceback.print_exc()
            status = 500
        took = time.perf_counter() - began
    body = f"{os.getpid()} {took * 1e6:.1f}".encode()
    headers = [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
"""
)

CELERY = (
    _COMMON
    + """
from celery import Celery
app = Celery(broker=os.environ["STORE_URL"], backend=os.environ["STORE_URL"])
app.conf.broker_connection_retry_on_startup = True
app.conf.worker_prefetch_multiplier = 1
app.conf.task_default_queue = os.environ["PREFIX"]
limiter = make()

@app.task
def calls(times):
    return os.getpid(), [call(limiter) for _ in range(times)]
"""
)
CELERY_CLIENT = """
import json, sys
from application import calls
times, each = int(sys.argv[1]), 10
results = [calls.delay(each) for _ in range(times // each)]
print(json.dumps([result.get(timeout=60) for result in results]))
"""

PROCESSES = (
    _COMMON
    + """
import json, multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
limiter = make()

def calls(times):
    time.sleep(0.01)  # otherwise the first process would finish before the others have started
    return os.getpid(), [call(limiter) for _ in range(times)]

if __name__ == "__main__":
    kind, method, times, each = sys.argv[1], sys.argv[2], int(sys.argv[3]), 10
    context = multiprocessing.get_context(method)
    work = [each] * (times // each)
    if kind == "Pool":
        pool = context.Pool(4)
        answers = pool.map(calls, work, chunksize=1)
        print(json.dumps(answers), flush=True)
        sys.stdin.readline()
        pool.close()  # not `terminate`, which `with` would call: see docs/servers.md
        pool.join()
    else:
        with ProcessPoolExecutor(4, mp_context=context) as pool:
            answers = list(pool.map(calls, work))
            print(json.dumps(answers), flush=True)
            sys.stdin.readline()
"""
)
