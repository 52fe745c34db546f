"""stub"""

from seedbed.train.system import Sample


def show(system, request, engine):
    return Sample()
