import sys

from viking.bench.command import main

sys.exit(main())
