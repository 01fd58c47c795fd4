"""The errors users of jpaged meet. Each message says what is wrong, what was got, the limit, and the remedy."""


class JpagedError(Exception):
    """Base of every error that jpaged raises for its users."""


class InvalidRequestError(JpagedError, ValueError):
    """A request that can never be served as it stands: a bad parameter, a bad prompt, a prompt too long."""


class CapacityError(JpagedError):
    """A request that cannot fit: it needs more pages than the pool has."""


class QueueFullError(JpagedError):
    """Too many requests wait already; the same request may be served later."""


class AbortedError(JpagedError):
    """The request was ended from outside before it was done."""


class EngineClosedError(AbortedError):
    """The engine was closed before the request was done; another engine may serve it."""


class EngineFailedError(JpagedError):
    """A bug: a step failed. Its requests are lost, the engine goes on with the next ones."""


class ConfigError(JpagedError, ValueError):
    """An engine configuration that cannot work on this machine or with this model."""


class ModelError(JpagedError):
    """A model that cannot be found, read, or mapped onto a known architecture."""
