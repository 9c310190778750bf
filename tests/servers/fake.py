"""fakeredis behind a real TCP port: the server that the demo falls back to, and nothing else."""

from distwindow.cli.demo.fake_server import FakeServer

__all__ = ["FakeServer"]
