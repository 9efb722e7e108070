"""Data, training and testing. With --data-parallel each rank sees its own part of the data."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

from sambaflow import samba
from sambaflow.samba.utils.dataset.mnist import load_dataset


def prepare_data(args: argparse.Namespace) -> tuple[DataLoader, DataLoader]:
    train_dataset, test_dataset = load_dataset(args)
    if args.limit:
        train_dataset, test_dataset = (Subset(d, range(min(args.limit, len(d)))) for d in (train_dataset, test_dataset))
    print(f"DataParallel run: {args.data_parallel}")
    sampler = DistributedSampler(train_dataset) if args.data_parallel else None
    train_loader = DataLoader(
        train_dataset, batch_size=args.batch_size, sampler=sampler, shuffle=sampler is None, num_workers=1, drop_last=True
    )
    return train_loader, DataLoader(test_dataset, batch_size=args.batch_size, shuffle=False, drop_last=True)


def inputs_of(args: argparse.Namespace, images: torch.Tensor, labels: torch.Tensor) -> list:
    return [
        samba.from_torch_tensor(images.reshape(-1, args.num_features), name="image", batch_dim=0),
        samba.from_torch_tensor(labels, name="label", batch_dim=0),
    ]


def train(args: argparse.Namespace, model: nn.Module) -> None:
    train_loader, test_loader = prepare_data(args)
    hyperparam_dict = {"lr": args.lr, "momentum": args.momentum, "weight_decay": args.weight_decay}
    total = len(train_loader)
    for epoch in range(args.num_epochs):
        mean = 0.0
        for i, (images, labels) in enumerate(train_loader):
            loss, _ = samba.session.run(
                input_tensors=inputs_of(args, images, labels),
                output_tensors=model.output_tensors,
                hyperparam_dict=hyperparam_dict,
                data_parallel=args.data_parallel,
                reduce_on_rdu=args.reduce_on_rdu,
            )
            mean += (float(samba.to_torch(loss)) - mean) / (i + 1)
            if (i + 1) % 10000 == 0 or i + 1 == total:
                print(f"Epoch [{epoch + 1}/{args.num_epochs}], Step [{i + 1}/{total}], Loss: {mean:.4f}", flush=True)
        test(args, model, test_loader)
    samba.session.to_cpu(model)
    Path(args.log_path).mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), Path(args.log_path) / "sn_boilerplate.pt")


def test(args: argparse.Namespace, model: nn.Module, test_loader: DataLoader) -> None:
    right = count = 0
    loss_sum = 0.0
    for images, labels in test_loader:
        loss, outputs = samba.session.run(
            input_tensors=inputs_of(args, images, labels), output_tensors=model.output_tensors, section_types=["fwd"]
        )
        right += int((samba.to_torch(outputs).argmax(1) == labels).sum())
        loss_sum, count = loss_sum + float(samba.to_torch(loss)), count + 1
    print(f"Test Accuracy: {100 * right / (count * args.batch_size):.2f} Loss: {loss_sum / count:.4f}", flush=True)
