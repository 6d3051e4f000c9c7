"""`relay.py PID`: wait for a rank that was started early; pass signals on, and end as it ends.

Loads nothing of SFT-Play: it lives as long as the run.
"""

import os
import signal
import sys

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

if __name__ == "__main__":
    rank = int(sys.argv[1])
    for number in PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: os.kill(rank, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    if code < 0:
        name = signal.Signals(-code).name
        sys.stderr.write(
            f"the run's process ended by {name}; its log in logs/rank-0.log has its last lines, "
            "and dmesg names what was killed for memory\n"
        )
    sys.exit(code if code >= 0 else 128 - code)
