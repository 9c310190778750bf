"""The windows of Sentinel, sentinel-golang and go-zero, in one process. They need no store."""
