"""A training program of its own: a small model, a step in some 20 ms, until the job is complete."""

PROGRAM = """
import time, torch
from diloco_worker import Learner
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
learner = Learner.connect(model, optimizer)
while not learner.done:
    loss = model(torch.ones(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    learner.step(tokens=10, loss=loss)
    time.sleep(0.02)
learner.close()
"""
