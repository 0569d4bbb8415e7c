"""The former place of `steepen.utils.values`, until no verb imports it from here."""

from steepen.utils.values import *  # noqa: F403
