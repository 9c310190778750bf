"""fakeredis on a TCP port: the server that the demo starts where there is no redis-server."""

from distwindow.cli.demo.fake_server import FakeServer

__all__ = ["FakeServer"]
