"""Files at a URL (`s3://`, `gs://`, `https://`, `hf://`, ...), as local copies in a cache of limited size.

A file is downloaded whole before it is read. Training visits samples in random order, and every image is decoded once
before the first epoch, so each byte is needed at the start anyway; reading samples over the network would cost one
request per sample and epoch, and any of them could fail. With local copies, nothing but the start of a run depends on
the network, and samples, indexes and fingerprints are those of local files.

`transfer` asks servers and reads files with retries, `cache` keeps the copies.
"""

from nuclr.remote.cache import local_copies, local_copy, show_urls
from nuclr.remote.transfer import copies_only, file_name, is_url, join_url, list_folder

__all__ = ["copies_only", "file_name", "is_url", "join_url", "list_folder", "local_copies", "local_copy", "show_urls"]
