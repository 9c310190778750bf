"""The logger of the gate. Celery configures it with its own."""

from celery.utils.log import get_logger

logger = get_logger("celery.distwindow")
