"""Sign a request to object storage in advance, for a device that makes it: AWS Signature Version 4, in the query.

The time is an argument, which boto3's own signer does not take: all devices that ask within a while get the same URL,
and a cache in front of the storage can answer them. A URL that is signed is a secret: it is never logged.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlsplit

_KIND: Final = "AWS4-HMAC-SHA256"


@dataclass(frozen=True)
class Credentials:
    """What requests are signed with; `token` is there if they are temporary."""

    key: str
    secret: str
    token: str | None = None


def presign(
    method: str,
    url: str,
    credentials: Credentials,
    region: str,
    at: float,
    seconds: int,
    headers: Mapping[str, str] | None = None,
) -> str:
    """Sign a request to a URL without a query, good for so many seconds; `headers` have to be sent with it as they are.

    `url` has its path percent-encoded.
    """
    place = urlsplit(url)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at))
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    signed = {"host": place.netloc, **{name.lower(): value.strip() for name, value in (headers or {}).items()}}
    names = ";".join(sorted(signed))
    asked = {
        "X-Amz-Algorithm": _KIND,
        "X-Amz-Credential": f"{credentials.key}/{scope}",
        "X-Amz-Date": stamp,
        "X-Amz-Expires": str(seconds),
        "X-Amz-SignedHeaders": names,
        **({"X-Amz-Security-Token": credentials.token} if credentials.token else {}),
    }
    query = "&".join(f"{name}={quote(value, safe='-_.~')}" for name, value in sorted(asked.items()))
    lines = "".join(f"{name}:{signed[name]}\n" for name in sorted(signed))
    request = f"{method}\n{place.path or '/'}\n{query}\n{lines}\n{names}\nUNSIGNED-PAYLOAD"
    text = f"{_KIND}\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{credentials.secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return f"{url}?{query}&X-Amz-Signature={hmac.digest(key, text.encode(), 'sha256').hex()}"
