"""The order in which CPython 2.7 goes through a dict of strings.

Code of that time numbered classes by it, and the networks trained with it still do.
"""

_WORD = (1 << 64) - 1


def dict_order(keys):
    """Keys in the order of `{k: v for k, v in d.items()}`, `d` filled in the order of `keys`.

    Args:
      keys: distinct str, encoded as UTF-8; fewer than 50,000.

    Returns:
      List of the same str.
    """
    return _filled(_filled(list(dict.fromkeys(keys))))


def _filled(keys):
    """Order of a dict that was filled key by key."""
    slots = [None] * 8
    for count, key in enumerate(keys, 1):
        _put(slots, key)
        if 3 * count >= 2 * len(slots):  # it grows to more than four times its entries
            bigger = [None] * 8
            while len(bigger) <= 4 * count:
                bigger += bigger
            for old in slots:
                if old is not None:
                    _put(bigger, old)
            slots = bigger
    return [key for key in slots if key is not None]


def _put(slots, key):
    """Open addressing as in CPython's `dictobject.c`."""
    value = perturb = _hash(key.encode("utf-8", "surrogateescape"))
    while slots[value % len(slots)] is not None:
        value = 5 * value + perturb + 1
        perturb >>= 5
    slots[value % len(slots)] = key


def _hash(text):
    """`hash(text)` of a byte string in 64-bit CPython 2.7 without -R, as an unsigned number."""
    if not text:
        return 0
    value = text[0] << 7
    for byte in text:
        value = (1000003 * value ^ byte) & _WORD
    value ^= len(text)
    return _WORD - 1 if value == _WORD else value  # -1 means an error there
