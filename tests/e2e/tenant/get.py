"""Prints the body of an answer: `get.py URL [HEADER=VALUE..] [BODY]`. With a body, in JSON, it is a POST."""

import sys
import urllib.request

url, *more = sys.argv[1:]
body = more.pop() if more and more[-1].startswith("{") else None
headers = dict(each.split("=", 1) for each in more)
request = urllib.request.Request(url, None if body is None else body.encode(), headers)
with urllib.request.urlopen(request, timeout=10) as answer:
    print(answer.read().decode(), end="")
