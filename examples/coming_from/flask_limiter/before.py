"""A Flask application with limits of Flask-Limiter.

gunicorn examples.coming_from.flask_limiter.before:app
"""

import os

from flask import Flask, request
from flask_limiter import Limiter
from flask_limiter.util import get_remote_address

URL = os.environ.get("REDIS_URL", "redis://localhost:6379/0")

app = Flask(__name__)
limiter = Limiter(
    get_remote_address,
    app=app,
    storage_uri=URL,
    application_limits=["10/minute"],
    swallow_errors=True,
)


@app.get("/search")
@limiter.limit("5/minute")
def search() -> str:
    return "found"


@app.post("/login")
@limiter.limit("3/minute", deduct_when=lambda response: response.status_code == 401)
def login() -> tuple[str, int]:
    return ("welcome", 200) if request.args["password"] == "right" else ("wrong", 401)
