"""Hostile text for documents that pages are made of."""

NASTY = "</script><img src=x onerror=alert(1)> & \"q\" 'r' <b>$title</b> %{x} \u2028"


def nasty(value):
    """Put hostile text wherever a document has text of a user's."""
    if isinstance(value, dict):
        return {k: nasty(v) for k, v in value.items()}
    if isinstance(value, list):
        return [nasty(each) for each in value]
    return NASTY if isinstance(value, str) else value
