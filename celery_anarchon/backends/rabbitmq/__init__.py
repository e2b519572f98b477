"""RabbitMQ: a claim is a publish to a queue that holds one message.

Modules: ``names`` (jobs → queues), ``channel`` (declares and confirms, many at a time), ``link``
(one connection and the channels that claims have on it), ``backend`` (claims → answers).
"""

from celery_anarchon.backends.rabbitmq.backend import RabbitMQBackend

__all__ = ("RabbitMQBackend",)
