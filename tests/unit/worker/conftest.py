"""Models of these tests are tiny: a second thread of torch only waits for a core that other tests use."""

import torch

torch.set_num_threads(1)
