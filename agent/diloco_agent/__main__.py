"""Entry point of our containers: `python3 -m diloco_agent ROLE -- ARGV...`."""

from __future__ import annotations

import logging
import sys

from diloco.errors import EXIT_USAGE, ConfigError
from diloco.runtime.logs import configure_logging
from diloco_agent import settings
from diloco_agent.supervisor import Supervisor, write_termination_message


def main() -> int:
    """Run until a signal or the policy ends it; returns the container's exit code."""
    try:
        config = settings.read(sys.argv[1:])
        configure_logging(json=config.json_logs, name="agent")
        return Supervisor(config).run()
    except ConfigError as error:
        print(f"diloco-agent: {error}", file=sys.stderr)
        write_termination_message(settings.termination_log(), error.reason, str(error))
        return EXIT_USAGE


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.exit(code)
