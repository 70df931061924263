"""A WSGI application whose data, about SHOP_MIB MiB, is made before the workers are forked."""
import hashlib
import os

COUNT = int(os.environ["SHOP_MIB"]) * 1000
STOCK = {b"%d" % i: hashlib.sha256(b"%d" % i).hexdigest() * 14 for i in range(COUNT)}


def application(environ, start_response):
    """/N: some goods that follow from N, and the page that lists them."""
    number = int(environ["PATH_INFO"][1:])
    goods = [STOCK[b"%d" % (number * 7919 * (i + 1) % COUNT)] for i in range(200)]
    page = "\n".join(good[i % 100:] for i, good in enumerate(goods)).encode()
    body = b"%d %s\n" % (len(page), hashlib.sha256(page).hexdigest().encode())
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
    return [body]
