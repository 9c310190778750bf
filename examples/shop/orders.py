"""The orders, a Flask application."""

from flask import Flask, request

from distwindow.contrib.flask import RateLimits, client_address

from .limits import NAME, PER_CUSTOMER, REDIS_URL

app = Flask(__name__)
rate_limits = RateLimits(REDIS_URL, on_store_error="allow")
rate_limits.init_app(app)


def customer() -> str:
    return request.headers.get("x-customer") or client_address()


@app.get("/health")
def health() -> dict[str, str]:
    return {"status": "ok"}


@app.get("/orders/<int:number>")
@rate_limits.limit(PER_CUSTOMER, name=NAME, key=customer)
def order(number: int) -> dict[str, int]:
    return {"order": number}
