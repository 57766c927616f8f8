"""Whatever all tests share."""

import os
import random

# Before workers of a parallel run start: what they are parametrised with has to be the same in all of them.
os.environ.setdefault("FRESH_SEED", str(random.SystemRandom().randrange(1 << 30)))
