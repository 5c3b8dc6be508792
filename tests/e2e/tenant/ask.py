"""Sends HTTP requests: `ask.py '[{"url":.., "method":.., "token":.., "headers":.., "body":..}]'`.

Prints for each the status of the answer, or what stopped it.
"""

import http.client
import json
import sys
from urllib.parse import urlsplit

found = []
for wanted in json.loads(sys.argv[1]):
    url = urlsplit(wanted["url"])
    headers = dict(wanted.get("headers", {}))
    if "token" in wanted:
        headers["Authorization"] = f"Bearer {wanted['token']}"
    body = json.dumps(wanted["body"]) if "body" in wanted else None
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=5)
    try:
        connection.request(wanted.get("method", "GET"), f"{url.path}?{url.query}".rstrip("?"), body, headers)
        found.append(connection.getresponse().status)
    except (OSError, http.client.HTTPException) as error:
        found.append(f"{type(error).__name__}: {error}")
    finally:
        connection.close()
print(json.dumps(found))
