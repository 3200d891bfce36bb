"""A small page of its own: a sentence, or the form that asks for the token.

It needs no other file, because whoever sees it may not read any.
"""

import jinja2

from autotune.reporting.html_text import printable_value

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="robots" content="noindex">
{% if goes_on %}<meta http-equiv="refresh" content="0">{% endif %}
<title>{{ title }} - autotune</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 34rem; margin: 12vh auto; padding: 0 1rem; }
label { display: block; margin: 1.5rem 0 .25rem; }
input, button { font: inherit; padding: .5rem .75rem; border-radius: .375rem;
  border: 1px solid GrayText; }
input { width: 100%; box-sizing: border-box; }
button { margin-top: 1rem; }
</style>
</head>
<body>
<main>
<h1>{{ title }}</h1>
<p>{{ sentence }}</p>
{% if hint %}<p>{{ hint }}</p>{% endif %}
{% if asks_for_token %}
<form method="post" action="{{ root }}/sign-in">
<input type="hidden" name="next" value="{{ next_path }}">
<label for="token">Token</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus>
<button type="submit">Sign in</button>
</form>
{% else %}
<p><a href="{{ root }}/">Home</a></p>
{% endif %}
</main>
</body>
</html>
"""

_ENVIRONMENT = jinja2.Environment(
    autoescape=True,
    finalize=printable_value,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATE = _ENVIRONMENT.from_string(_PAGE)


def plain_page(*, title: str, sentence: str, hint: str = "", root: str = "") -> str:
    """Returns a page with a sentence on what is wrong and a link home, to the path `root`."""
    return _TEMPLATE.render(
        title=title,
        sentence=_sentence(sentence),
        hint=_sentence(hint),
        asks_for_token=False,
        next_path="",
        goes_on=False,
        root=root,
    )


def sign_in_page(*, sentence: str, next_path: str, goes_on: bool = False, root: str = "") -> str:
    """Returns the page that asks for the token.

    With `goes_on` it loads again by itself: a browser that follows a link of another site leaves
    the cookie out (SameSite=Strict), and sends it when this page repeats the request.
    """
    return _TEMPLATE.render(
        title="Sign in",
        sentence=_sentence(sentence),
        hint="It is in the URL that autotune serve has printed, or in AUTOTUNE_TOKEN.",
        asks_for_token=True,
        next_path=next_path,
        goes_on=goes_on,
        root=root,
    )


def _sentence(text: str) -> str:
    """Returns the text with a capital letter and a full stop."""
    if not text:
        return ""
    return text[0].upper() + text[1:] + ("" if text[-1] in ".!?" else ".")
