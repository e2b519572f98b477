"""RabbitMQ: a claim is a publish to a queue that holds one message.

Modules: ``names`` (jobs → queues), ``channel`` (declares and confirms, many at a time), ``wire``
(a connection and its channel that publishes; tasks use it too, where their confirms are wanted),
``link`` (what claims do on it), ``backend`` (claims → answers).
"""

from celery_anarchon.backends.rabbitmq.backend import RabbitMQBackend

__all__ = ("RabbitMQBackend",)
