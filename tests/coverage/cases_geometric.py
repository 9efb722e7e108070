"""Graph networks of torch_geometric: every operator in the network of the library's introduction (convolution, relu, dropout,
convolution), with the edges as an input. With their defaults GCNConv, GATConv and ChebConv pick out the self loops by value."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from judge import Case, case
from torch import Tensor, nn
from torch_geometric.nn import (
    ChebConv,
    GATConv,
    GCNConv,
    GINConv,
    GraphConv,
    SAGEConv,
    SchNet,
    TransformerConv,
    global_mean_pool,
)

NODES, FEATURES, HIDDEN, CLASSES = 12, 8, 16, 4


class Nodes(nn.Module):
    """A class for every node."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.first(x, edges)), training=self.training)
        return self.second(x, edges)


class Graphs(nn.Module):
    """A class for every graph; `graphs` is their number, or None to have it read from `batch`."""

    def __init__(self, graphs: int | None) -> None:
        super().__init__()
        self.graphs = graphs
        self.first, self.second = GraphConv(FEATURES, HIDDEN), GraphConv(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
        x = self.second(F.relu(self.first(x, edges)), edges)
        x = F.dropout(global_mean_pool(x, batch, self.graphs), training=self.training)
        return self.head(x)


class Complete(nn.Module):
    """SchNet's graph where every two atoms of a molecule are neighbours; its own needs a compiled package to find them."""

    def __init__(self, edges: Tensor) -> None:
        super().__init__()
        self.register_buffer("edges", edges)

    def forward(self, pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        return self.edges, (pos[self.edges[0]] - pos[self.edges[1]]).norm(dim=-1)


def _ring(nodes: int) -> Tensor:
    """A ring with chords, in both directions, without self loops."""
    i = torch.arange(nodes)
    one = torch.stack([torch.cat([i, i]), torch.cat([(i + 1) % nodes, (i + 3) % nodes])])
    return torch.cat([one, one.flip(0)], dim=1)


def _nodes(operator: Any, **config: Any) -> Case:
    model = Nodes(operator(FEATURES, HIDDEN, **config), operator(HIDDEN, CLASSES, **config))
    return _case(model, (torch.randn(NODES, FEATURES), _ring(NODES)), torch.randint(CLASSES, (NODES,)))


def _case(model: nn.Module, inputs: tuple[Tensor, ...], labels: Tensor) -> Case:
    return Case(model=model, inputs=inputs, targets=(labels,), loss=F.cross_entropy)


@case("pyg/gcn")
def gcn() -> Case:
    return _nodes(GCNConv)


@case("pyg/gcn_without_self_loops")
def gcn_without_self_loops() -> Case:
    return _nodes(GCNConv, add_self_loops=False)


@case("pyg/gat")
def gat() -> Case:
    model = Nodes(GATConv(FEATURES, HIDDEN, heads=2), GATConv(2 * HIDDEN, CLASSES))
    return _case(model, (torch.randn(NODES, FEATURES), _ring(NODES)), torch.randint(CLASSES, (NODES,)))


@case("pyg/gat_without_self_loops")
def gat_without_self_loops() -> Case:
    return _nodes(GATConv, add_self_loops=False)


@case("pyg/sage")
def sage() -> Case:
    return _nodes(SAGEConv)


@case("pyg/gin")
def gin() -> Case:
    def mlp(inside: int, outside: int) -> GINConv:
        return GINConv(nn.Sequential(nn.Linear(inside, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outside)), train_eps=True)

    return _nodes(mlp)


@case("pyg/transformer")
def transformer() -> Case:
    return _nodes(TransformerConv, heads=2, concat=False)


@case("pyg/cheb")
def cheb() -> Case:
    return _nodes(ChebConv, K=3)


def _graphs(size: int | None) -> Case:
    edges = torch.cat([_ring(NODES), _ring(NODES) + NODES], dim=1)
    batch = torch.arange(2).repeat_interleave(NODES)
    return _case(Graphs(size), (torch.randn(2 * NODES, FEATURES), edges, batch), torch.randint(CLASSES, (2,)))


@case("pyg/graph_conv_pool")
def graph_conv_pool() -> Case:
    return _graphs(size=2)


@case("pyg/graph_conv_pool_counted")
def graph_conv_pool_counted() -> Case:
    return _graphs(size=None)


@case("pyg/schnet")
def schnet() -> Case:
    atoms = 5
    pairs = torch.tensor([(m * atoms + i, m * atoms + j) for m in range(2) for i in range(atoms) for j in range(atoms) if i != j])
    small = {"hidden_channels": 16, "num_filters": 16, "num_interactions": 2, "num_gaussians": 10}
    model = SchNet(interaction_graph=Complete(pairs.t().contiguous()), **small)
    inputs = (torch.randint(1, 10, (2 * atoms,)), torch.randn(2 * atoms, 3), torch.arange(2).repeat_interleave(atoms))
    return Case(model=model, inputs=inputs, targets=(torch.randn(2, 1),), loss=F.mse_loss, optimizer=_gently)


def _gently(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9)
