"""The four-file starter: arguments, model, training, and this main().

python sn_boilerplate_main.py compile -b=1 --pef-name="sn_boilerplate" --output-folder="pef"
python sn_boilerplate_main.py run --pef="pef/sn_boilerplate/sn_boilerplate.pef"
"""

from sn_boilerplate_args import add_common_args, add_run_args
from sn_boilerplate_model import FFNLogReg
from sn_boilerplate_other import train

import sambaflow.samba.utils as utils
from sambaflow import samba
from sambaflow.samba.utils.argparser import parse_app_args
from sambaflow.samba.utils.common import common_app_driver


def main() -> None:
    utils.set_seed(256)
    args = parse_app_args(common_parser_fn=add_common_args, run_parser_fn=add_run_args)
    model = FFNLogReg(args.num_features, args.hidden_size, args.num_classes)
    samba.from_torch_model_(model)
    optimizer = samba.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    inputs = (
        samba.randn(args.batch_size, args.num_features, name="image", batch_dim=0),
        samba.randint(args.num_classes, (args.batch_size,), name="label", batch_dim=0),
    )
    if args.command == "run":
        utils.trace_graph(model, inputs, optimizer, pef=args.pef, mapping=args.mapping)
        train(args, model)
    else:
        common_app_driver(args, model, inputs, optimizer, name="sn_boilerplate", app_dir=utils.get_file_dir(__file__))


if __name__ == "__main__":
    main()
