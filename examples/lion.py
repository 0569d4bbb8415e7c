"""Lion as an optimizer of the block matrices: `steepen train … --set optimizer.kind=lion:lion` here."""

import torch


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., 2023)."""

    def __init__(self, parameters, lr, betas, weight_decay):
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        """Move every weight by the learning rate, in the direction of the sign of its momentum."""
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                update = state["exp_avg"].lerp(p.grad, 1 - beta1).sign_()
                p.mul_(1 - lr * group["weight_decay"]).sub_(update, alpha=lr)
                state["exp_avg"].lerp_(p.grad, 1 - beta2)


def lion(named_parameters, config, hyperparameters):
    """The optimizer of these parameters, at the run's learning rate and weight decay."""
    parameters = [parameter for _, parameter in named_parameters]
    weight_decay = hyperparameters.weight_decay
    return Lion(parameters, hyperparameters.learning_rate, (0.9, 0.99), weight_decay)
