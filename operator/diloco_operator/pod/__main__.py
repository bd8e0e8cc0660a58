"""Entry point of every container of ours: `python3 -m diloco_operator.pod ROLE -- ARGV...`."""

from __future__ import annotations

import logging
import sys

from diloco.errors import EXIT_USAGE, ConfigError
from diloco.telemetry import configure_logging
from diloco_operator.pod import settings
from diloco_operator.pod.supervisor import Supervisor, leave_message


def main() -> int:
    """Run until told to stop; the container's exit code."""
    try:
        given = settings.read(sys.argv[1:])
        configure_logging(json=given.json_logs, name="pod")
        return Supervisor(given).run()
    except ConfigError as error:
        print(f"diloco-pod: {error}", file=sys.stderr)
        leave_message(settings.termination_log(), error.reason, str(error))
        return EXIT_USAGE


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.exit(code)
