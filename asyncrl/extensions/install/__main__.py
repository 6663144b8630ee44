"""python -m asyncrl.extensions.install, where the command asyncrl-install does not exist yet."""

import sys

from asyncrl.extensions.install.command import main

sys.exit(main())
