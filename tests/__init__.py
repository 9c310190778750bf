"""The tests of distwindow."""
