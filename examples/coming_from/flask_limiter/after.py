"""The same application with limits of distwindow.

gunicorn examples.coming_from.flask_limiter.after:app
"""

import os

from flask import Flask, request

from distwindow.contrib.flask import RateLimits

URL = os.environ.get("REDIS_URL", "redis://localhost:6379/0")

app = Flask(__name__)
rate_limits = RateLimits(URL, on_store_error="allow", prefix="shop")
rate_limits.init_app(app)
rate_limits.limit_app("10/minute")


@app.get("/search")
@rate_limits.limit("5/minute")
def search() -> str:
    return "found"


@app.post("/login")
@rate_limits.limit("3/minute", count_when=lambda response: response.status_code == 401)
def login() -> tuple[str, int]:
    return ("welcome", 200) if request.args["password"] == "right" else ("wrong", 401)
