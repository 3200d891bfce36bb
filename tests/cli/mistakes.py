"""Command lines that must be rejected, by command, separated by ` | ` or line ends.

To add one, write the rest of the command line as in a shell. `mistaken_files.py` creates the files
that it names. `real` is a study in real.db, which `IN_REAL` stands for. A test fails if an option
of a command is in none of these lines.
"""

import shlex
from collections.abc import Iterator, Mapping

from autotune.spec.config import TrainingConfig
from autotune.spec.setting import options_of
from autotune.spec.workload import Workload
from autotune.study.request import SearchRequest
from tests.cli.mistaken_files import DATASETS, IN_REAL, dataset_options
from tests.cli.mistaken_spaces import SPACES, space_file

_OF_A_SEARCH = " | ".join(
    f"--trials 1 {option.flag}" + ("" if option.is_switch else " 1")
    for option in (*options_of(SearchRequest).values(), *options_of(Workload).values())
    if option.is_typed and option.flag != "--storage"
)
"""Every option of a search, for a command that needs a server in addition to it."""


def _each_technique(before: str = "") -> str:
    """Returns a line for each technique with a value that it does not have."""
    options = options_of(TrainingConfig).values()
    return " | ".join(f"{before} {option.flag} nonesuch" for option in options)


COMMAND_LINES = {
    "": """
        --bogus | frobnicate | --version=3 | --nonesuch search
        --no-defaults=3 | --no-defaults bogus | --install-completion=x | --show-completion=x
    """,
    "search": r"""
        --from missing.yaml | --from folder | --from '' | --from garbage.toml
        --world-size 0
        --max-mem 8,5GiB | --max-mem -1 | --max-mem 0 | --max-mem '' | --max-mem abc
        --max-mem 8gib | --max-mem 8G | --tolerance speed=5%
        --max-perplexity-increase 5% | --max-perplexity-increase 1.2.3%
        --tolerance speed=1.2.3%
        --max-mem 1e400 | --max-mem 1e309 | --max-mem 8GiBB | --max-mem ٨GiB | --max-mem 0x10
        --max-mem 1e-3GiB
        --max-mem 8 | --max-mem nan | --max-mem inf | --max-mem '8 G iB' | --max-mem 8GiB8
        --max-mem 9999999999TiB
        --max-mem 1_000MiB | --max-mem +8GiB | --max-mem 8. | --max-mem .5GiB | --max-mem '8\nGiB'
        --max-mem
        --trials 0 | --trials x | --trials -5 | --trials 1.5 | --trials ''
        --trials 99999999999999999999
        --trials 1e3
        --confirm-share 2 | --confirm-share -1 | --confirm-share nan | --confirm-share x
        --no-confirm=x
        --prompt-format alpca | --prompt-format '' | --prompt-format '{question}'
        --adapter-dropout 0.05 | --adapter-dropout 1.0 | --modules-to-save head
        --adapter-alpha 32 | --adapter-scaling rslora | --adapter-init pissa
        --space finetune --adapter-alpha 0 | --space finetune --adapter-init eva
        --space finetune --adapter-rank-pattern q_proj
        --space finetune --adapter-rank-pattern '(=4'
        --space finetune --adapter-rank-pattern '(?i)q=4'
        --space finetune --adapter-rank-pattern q_proj=1.5
        --space finetune --adapter-alpha-pattern q_proj=0
        --space finetune --modules-to-save a- | --modules-to-save-dtype base
        --seed -1 | --seed 4294967296 | --seed x | --seed 1.5
        --seeds 0 | --seeds -1 | --seeds 101 | --seeds many
        --device gpu | --device cuda:x | --device tpu | --device '' | --device cuda:
        --device cuda:-1 | --device CPU
        --device cuda:٣ | --device cuda:99999999999999999999 | --device 'cpu\n' | --device cpu:0
        --sampler foo | --sampler '' | --until-converged --sampler tpe | --until-converged=yes
        --name a/b | --name '' | --name ../x | --name .hidden | --name -x | --name 'a b'
        --name é | --name 'a\nb'
        --name '\x1b[31mred' | --name NAME_OF_101 | --name 'a\udcffb'
        --time-budget soon | --time-budget -1 | --time-budget 0 | --time-budget ''
        --time-budget 1h30
        --time-budget inf
        --confirm-share 0.6 | --confirm-share -0.1 | --confirm-share nan | --confirm-share 20%
        --no-confirm --layers 0 | --no-confirm=1
        --time-budget 1e10d | --time-budget 5min | --time-budget '1\nh'
        --workers 0 | --workers 1025 | --workers x | --trials-per-device 0 | --trials-per-device 1.5
        --devices 0 | --devices 1025 | --devices gpu | --devices '' | --devices cuda:0,cuda:0
        --devices all,cuda:0 | --devices cuda:0, | --devices -1 | --devices 1.5 | --devices ALL
        --ray '' | --ray head | --ray http://head:8265 | --ray ray://head | --ray ray://head:x
        --ray auto --devices cuda:0,cuda:1 | --ray local --device cuda:1 | --ray AUTO
        --devices 2 --workers 3 | --devices cuda:0 --device cuda:0 | --devices ٣
        --database-wait soon | --database-wait -1s | --database-wait nan
        --compile-time-limit 11m | --compile-time-limit x | --step-time-limit 11m
        --step-time-limit 0s
        --trial-time-limit nonsense | --trial-time-limit 0s | --trial-time-limit nan
        --trial-time-limit -3m
        --prefer speed | --prefer ''
        --tolerance x | --tolerance speed=a | --tolerance speed=2 | --tolerance speed=nan
        --tolerance speed=-0.1
        --tolerance memory=0.1 | --tolerance speed | --tolerance speed= | --tolerance =0.1
        --tolerance speed=1_0
        --tolerance speed=0.1 --tolerance speed=0.2 | --tolerance speed=٠
        --tolerance perplexity=inf
        --max-perplexity-increase -1 | --max-perplexity-increase nan | --max-perplexity-increase inf
        --max-perplexity-increase x
        --learning-rate adamw | --learning-rate foo=1 | --learning-rate adamw=-1
        --learning-rate adamw=nan
        --learning-rate adamw=0 | --learning-rate adamw=1e999
        --learning-rate adamw=1e-3 --learning-rate adamw=1e-4
        --layers x | --layers 0 | --layers -1 | --layers 99999999999999999999 | --layers 2.5
        --layers '' | --layers 1001 | --global-batch 1048577 | --width 1048576 --heads 8
        --width 130 --heads 4 | --width 0 | --width 9999999999 | --heads 0 | --heads 5 | --heads -4
        --feed-forward-width 0 | --feed-forward-width -1 | --vocab-size 10 | --vocab-size 0
        --vocab-size 99999999999
        --seq-len 0 | --seq-len x | --seq-len 99999999999 | --global-batch 0 | --global-batch -8
        --steps 1 | --steps 0 | --steps 9999999999 | --warmup-steps 0 | --warmup-steps 60
        --warmup-steps -1
        --eval-sequences 0 | --eval-sequences -1 | --lr-warmup-steps 0 | --lr-warmup-steps x
        --schedule linear | --schedule '' | --gradient-clipping 0 | --gradient-clipping -1
        --gradient-clipping nan
        --gradient-clipping inf | --gradient-clipping x | --devices-per-trial 0
        --devices-per-trial 3 | --devices-per-trial x | --devices-per-trial 5000
        --devices-per-trial 2 --script train.py
        --devices 3 --devices-per-trial 2 | --workers 3 --devices-per-trial 2
        --devices cuda:0,cuda:1,cuda:2 --devices-per-trial 2
        --ray auto --devices 6 --devices-per-trial 4 | --devices-per-trial 2 --nodes-per-trial 2
        --ray auto --devices-per-trial 4 --nodes-per-trial 3 | --ray auto --nodes-per-trial 2
        --nodes-per-trial 0 | --nodes-per-trial x | --nodes-per-trial 5000
        --device cpu --devices 2 --devices-per-trial 4
        --pipeline-parallel 2 | --context_parallel 2 | --expert-parallel-size 2
        --space nope | --space '' | --space folder | --space garbage.toml | --space missing.toml
        --space pipe
        --space LONG | --space ~nobody/x.toml | --space /dev/zero | --space huge.toml
        --space /dev/stdin | --space quick --scale full
        --scale tiny
        --space peak_memory --scale huge | --space peak_memory --scale '' | --space chain-a.toml
        --storage nonsense | --name any --storage nonsense | --storage ''
        --storage nonesuch://localhost/studies
        --storage sqlite:///garbage.db | --name any --storage sqlite:///garbage.db
        --storage sqlite:///folder
        --storage sqlite:///file/autotune.db | --storage sqlite:///pipe
        --storage sqlite:////proc/none/autotune.db
        --storage sqlite:// | --storage sqlite:///:memory: | --storage sqlite:///empty.db/x.db
        --storage mysql://user:secret@localhost/studies | --storage sqlite:///LONG.db
        --storage '\x1b]0;x\x07'
        --storage sqlite:///loop.db | --storage sqlite:///loop/x.db | --storage sqlite:///~/x.db
        --storage sqlite:///LONGNAME.db | --storage 'sqlite:///\udcff.db'
        --space loop.toml | --dataset loop.txt | --dataset loop/x.txt | --tokenizer loop.json
        --model loop.json | --model loop.py:build | --script loop.py
        --dataset missing.txt | --dataset '' | --dataset ~nobody/x.txt | --dataset LONG.txt
        --dataset './a\nb.txt'
        --dataset pipe | --dataset /dev/zero | --dataset ./nowhere | --dataset a/b/c/d
        --dataset good.txt --held-out-split test | --held-out-split test | --packing loose
        --packing ''
        --dataset parts --dataset-split nope | --dataset parts --held-out-split nope
        --dataset table.csv --text-column no
        --dataset records.jsonl --text-column number
        --dataset parts --dataset-config nope --dataset-split train
        --streaming=yes | --streaming --no-streaming --dataset missing.jsonl
        --no-callback=1 | -m missing.py
        --tokenizer model | --tokenizer bpe --vocab-size 257 | --tokenizer ''
        --tokenizer missing.json
        --tokenizer folder | --tokenizer garbage.json | --tokenizer empty.json
        --tokenizer list.json
        --tokenizer ./nowhere | --tokenizer pipe | --tokenizer ~nobody/tokenizer.json
        --tokenizer large.json
        --model nope | --model '' | --model folder | --model garbage.toml | --model typo.json
        --model missing/config.json
        --model list.json | --model empty.json | --model pipe | --model /dev/zero
        --model ~nobody/config.json
        --model LONG | --model llama --width 64 | --model llama --feed-forward-width 64
        --model llama --seq-len 4096
        --model llama --vocab-size 300 | --model no_layers.json | --model minus.json
        --model nan.json
        --model deep.json | --model huge.json | --model many_layers.json --layers 0
        --model many_layers.json
        --model llama --pretrained | --model broken --pretrained | --model pickled --pretrained
        --model llama --pretrained --layers 3 | --pretrained | --pretrained --model deep-one
        --pretrained=yes
        --model own.py | --model own.py: | --model :build | --model own.py:build.it
        --model missing.py:build
        --model broken.py:build | --model binary.py:build | --model pipe.py:build
        --model folder.py:build
        --model own.py:build --width 64 | --model deep.py:build | --model 'a b:c'
        --model latin.py:build
        --script missing.py | --script train | --script '' | --script broken.py | --script pipe.py
        --script folder.py | --script no_package.train | --steps 40 -- config.py
        --script train.py --model gpt | --script train.py --layers 3
        --script train.py --dataset good.txt
        --script train.py --learning-rate sgd=1 | --script train.py --tokenizer bytes
        --script ~nobody/train.py
        --script train.py --schedule cosine | --script train.py --eval-sequences 5
        --script binary.py | --script train.py x.py -- y
        --profile all | --profile '' | --profile front --ray local | --profile pick --script x.py
        --memory-snapshot --device cpu | --memory-snapshot=x | --dry-run --json
        --time-trials
        --dry-run --max-mem x
        --json --trials 0 | --quiet --trials 0 | -q --trials 0 | --verbose --trials 0
        -v --trials 0
        --no-predict=1 | --full-trainings=1 | --fresh=1
        --no-predict --full-trainings --fresh --trials 0
        --bogus | surplus | --trails 5 | -z | --name real IN_REAL --seed 3
        --name real IN_REAL --steps 30
        --name real IN_REAL --space quick | --name real IN_REAL --space nope
        --name real IN_REAL --max-mem 1GiB
        --name real IN_REAL --scale tiny | --name real IN_REAL --sampler grid
        --name real IN_REAL --until-converged
        --server nonsense | --server '' | --server ftp://host | --server http://
        --server http://me:secret@host | --server http://host:x | --server http://host/?key=1
        --server http://host/#part | --server http://host --storage sqlite:///other.db
        --server http://host --dry-run --time-trials
        --server http://host --trials 0 --prefer speed
    """,
    "fit": _each_technique("--max-mem 8GiB")
    + r"""
        --from missing.yaml | --from folder | --from '' --max-mem 8GiB
        --max-mem 8GiB --world-size 0
        --max-mem 8,5GiB | --max-mem 8 | --json | --max-mem 8GiB surplus
        nope | nope --trial 1 | --trial 1 --max-mem 8GiB | real --layers 3 IN_REAL
        real --trial 99 IN_REAL | real --precision fp32 IN_REAL | real --storage nonsense
        --trial x | real --space quick IN_REAL
        --max-mem 8GiB --vary depth | --max-mem 8GiB --vary ''
        --max-mem 8GiB --vary width --model llama
        --max-mem 8GiB --context much | --max-mem 8GiB --context -1
        --max-mem 8GiB --device cpu --context 1GiB | real --context 1GiB IN_REAL
        --max-mem 8GiB --device tpu | --max-mem 8GiB --torch two | --max-mem 8GiB --torch 2
        --max-mem 8GiB --torch ٢.٨
        --max-mem 8GiB --micro-batch 3
        --max-mem 8GiB --micro-batch 0
        --max-mem 8GiB --compile block --memory-budget 2 | --max-mem 8GiB --memory-budget 0.5
        --max-mem 8GiB --checkpointing block --compile block --memory-budget 0.5
        --max-mem 8GiB --memory-budget nan | --max-mem 8GiB --checkpointing all
        --max-mem 8GiB --optimizer adafactor --optimizer-fusion kernel
        --max-mem 8GiB --attention flash --precision fp32
        --max-mem 8GiB --sharding zero3
        --max-mem 8GiB --devices-per-trial 3
        --max-mem 8GiB --devices-per-trial 2 --nodes-per-trial 2
        --max-mem 8GiB --nodes-per-trial 2 --no-trial
        --max-mem 8GiB --devices-per-trial 4 --sharding hsdp --sharding-group 3
        --max-mem 8GiB --tensor-parallel 2
        --max-mem 8GiB --adapter lora --adapter-rank 0
        --max-mem 8GiB --adapter-rank 16 | --max-mem 8GiB --adapter-targets attention
        --max-mem 8GiB --adapter lora --adapter-targets mlp | --max-mem 8GiB --base-weights nf4
        --max-mem 8GiB --adapter-kernels fused
        --max-mem 8GiB --adapter lora --base-weights int4 | --max-mem 8GiB --vary rank
        --max-mem 8GiB --adapter-alpha 32 | --max-mem 8GiB --adapter lora --adapter-alpha x
        --max-mem 8GiB --adapter lora --adapter-rank-pattern q_proj=0
        --max-mem 8GiB --adapter-alpha-pattern q_proj=4 | --max-mem 8GiB --adapter-init pissa
        --max-mem 8GiB --adapter-scaling rslora
        --max-mem 8GiB --adapter-dropout 0.05 | --max-mem 8GiB --adapter lora --adapter-dropout 1
        --max-mem 8GiB --modules-to-save head | --max-mem 8GiB --modules-to-save-dtype base
        --max-mem 8GiB --space nope
        --max-mem 8GiB --space quick --precision fp32 | --max-mem 8GiB --scale tiny
        --max-mem 8GiB --space peak_memory --scale huge | --max-mem 8GiB --width 130 --heads 4
        --max-mem 8GiB --model nope | --max-mem 8GiB --layers 0 | --max-mem 8GiB --vocab-size 1
        --max-mem 8GiB --feed-forward-width 0 | --max-mem 8GiB --seq-len 0
        --max-mem 8GiB --global-batch 0
        --max-mem 8GiB --gradient-clipping 0
        --max-mem 8GiB --gradient-clipping 1 --optimizer-fusion backward
        --max-mem 8GiB --compute-capability 9 | --max-mem 8GiB --compute-capability 9.0 --device cpu
        --max-mem 8GiB --no-trial=1 | --max-mem x --no-confirm --json --quiet | --max-mem x -q
        --max-mem x --no-trial --verbose | --max-mem x -v | --max-mem 8GiB --all
    """,
    "predict": _each_technique()
    + r"""
        --from missing.yaml | --from folder | --from ''
        --max-mem 8,5GiB | --max-mem 8GiBB --json | --device tpu | --device cuda:1:2
        --study real IN_REAL
        --trial 0 | --trial x | --study real --trial 99 IN_REAL | --study real --trial -1 IN_REAL
        --study nope --trial 0
        --study nope --trial 0 IN_REAL | --study real --trial 0 --layers 3 IN_REAL
        --study real --trial 0 --space quick IN_REAL | --study real --trial 0 --device cuda IN_REAL
        --study real --trial 0 --storage nonsense
        --study real --trial 0 --storage sqlite:///garbage.db
        --space nope | --space quick --precision fp32 | --space quick --plot step.html
        --scale tiny
        --space peak_memory --scale huge
        --model nope | --model llama --width 64 | --layers 0 | --width 130 --heads 4 | --heads 0
        --feed-forward-width 0
        --vocab-size 1 | --seq-len 0 | --global-batch 0 | --gradient-clipping nan
        --memory-budget 0.5 | --memory-budget 1.5 | --micro-batch 3 | --micro-batch 0
        --torch two | --torch 2.8.0.1
        --compute-capability nine | --compute-capability 9 | --compute-capability ''
        --compute-capability 9.0 --device cpu
        --study real --trial 0 --compute-capability 9.0 IN_REAL
        --study real --trial 0 --compute-capability nine IN_REAL
        --sharding zero3 | --devices-per-trial 0 | --devices-per-trial x
        --devices-per-trial 3 | --devices-per-trial 2 --sharding none
        --nodes-per-trial 2 | --devices-per-trial 4 --nodes-per-trial 3
        --world-size 3 | --world-size x | --world-size 0
        --devices-per-trial 4 --sharding hsdp --sharding-group 3 | --sharding-group 2
        --devices-per-trial 4 --tensor-parallel 3 | --tensor-parallel 2
        --gradient-reduction bf16
        --adapter lora --adapter-rank 0 | --adapter lora --adapter-rank x
        --adapter lora --adapter-rank 100000 | --adapter-rank 16 | --adapter-targets attention
        --adapter lora --adapter-targets mlp | --base-weights nf4
        --adapter dora --adapter-kernels fused | --adapter lora --adapter-kernels triton
        --adapter-dropout 0.05 | --adapter lora --adapter-dropout 5% | --modules-to-save head
        --adapter lora --adapter-dropout -0.1 | --adapter lora --modules-to-save 'a b'
        --adapter lora --modules-to-save '' | --adapter lora --modules-to-save-dtype bf16
        --space quick --adapter-dropout 0.05 | --space quick --adapter-init pissa
        --adapter lora --adapter-rank-pattern q_proj | --adapter lora --adapter-scaling none
        --adapter-alpha 8 | --adapter lora --adapter-alpha-pattern '[=4'
        --all | --all --precision fp32 | --whole-depth=x
        --whole-depth --space nope
        --plot step.pdf | --plot loop.html | --plot loop/x.html | --plot pipe.html
        --plot ''
        --plot file/step.html | --plot folder
        --quiet --layers 0 | -q --layers 0 | surplus
    """,
    "profile": r"""
        nope | nope IN_REAL | real 99 IN_REAL | real -1 IN_REAL | real x IN_REAL
        real 0 --steps 0 IN_REAL | real 0 --steps 101 IN_REAL | real 0 --steps x IN_REAL
        real 0 --compare IN_REAL | real 0 1 2 --compare IN_REAL | real 0 1 --out x IN_REAL
        real 0 --out . IN_REAL | real 0 -o . IN_REAL | real 0 --storage nonsense
        real 99 --json IN_REAL | real 99 --quiet IN_REAL | real 99 -q IN_REAL
        real 99 --fresh IN_REAL
    """,
    "explain": _each_technique()
    + r"""
        --from missing.yaml | --from folder | --from ''
        --world-size 0 | nope | nope IN_REAL | nope 0
        real 99 IN_REAL | real -1 IN_REAL | real x IN_REAL | nope 0 IN_REAL
        real 0 --layers 3 IN_REAL
        real 0 --space quick IN_REAL | real 0 --device cpu IN_REAL | real 0 --storage nonsense
        real 0 1 IN_REAL | --storage sqlite:///garbage.db | --json --quiet
        real 0 --precision fp32 IN_REAL | real 0 --name x IN_REAL
        real 0 --storage sqlite:///garbage.db
        --device tpu | --space quick | --name x | --space quick --name x | --space nope --name x
        --scale tiny
        --space quick --name 'checkpoint every block' --precision fp32
        --space peak_memory --scale huge --name control
        --layers 0 | --layers 0 --device cpu | --model nope | --width 130 --heads 4 | --heads 0
        --feed-forward-width 0
        --vocab-size 1 | --seq-len 0 | --global-batch 0 | --gradient-clipping -1
        --memory-budget 0.5 | --micro-batch 3 | --torch two | --json --layers 0
        --quiet --layers 0 | -q --layers 0
        --compute-capability nine | --compute-capability 9.0 --device cpu
        --sharding zero3 | --devices-per-trial 3
        --devices-per-trial 4 --sharding hsdp --sharding-group 3 | --tensor-parallel 2
        --nodes-per-trial 0
        --adapter dora --adapter-rank -1 | --adapter-targets attention
        --adapter-kernels fused
        --base-weights int8 | real 0 --adapter lora IN_REAL
        --adapter-dropout 0.05 | --adapter lora --adapter-dropout nan | --modules-to-save head
        --adapter-init pissa | --adapter lora --adapter-alpha-pattern q_proj=-1
        --adapter-alpha 1.5 | --adapter-scaling rslora | --adapter-rank-pattern q_proj=4
        --adapter lora --modules-to-save-dtype int8
        real 0 --compute-capability 9.0 IN_REAL
    """,
    "show": r"""
        nope | nope IN_REAL | '' IN_REAL | nope --storage nonsense
        nope --storage sqlite:///garbage.db
        nope --storage sqlite:///empty.db | nope --storage sqlite:///foreign.db
        nope --storage sqlite:///missing.db
        nope --storage sqlite:///loop.db | nope --storage sqlite:///LONGNAME.db
        nope --storage 'sqlite:///\udcff.db' | nope --storage sqlite:///file/x.db
        nope --storage sqlite:///folder | nope --storage sqlite:///pipe | nope --prefer speed
        real --prefer speed IN_REAL
        real more IN_REAL | real 1 IN_REAL | real --csv --json IN_REAL
        real --csv --markdown IN_REAL
        real --reference IN_REAL
        real --reference --csv IN_REAL | real --tolerance x IN_REAL
        real --max-perplexity-increase nan IN_REAL
        'a\nerror: b' IN_REAL | '\x1b[2J' IN_REAL | real --max-perplexity-increase x IN_REAL
        real --server nonsense | real --server http://host IN_REAL
        real --server http://host --reference | real --server 'http://host/?token=a b'
    """,
    "confirm": r"""
        nope | nope IN_REAL | '' IN_REAL | nope --storage nonsense | nope more
        nope --storage sqlite:///garbage.db
        real --trial 99 IN_REAL | real --trial -1 IN_REAL | real --trial x IN_REAL
        real --time-budget soon IN_REAL | real --time-budget 0 IN_REAL
        real --time-budget -1 IN_REAL
        real --confirm-share 0.6 IN_REAL | real --confirm-share -0.1 IN_REAL
        real --ray head IN_REAL | real --ray '' IN_REAL
        real --confirm-share x IN_REAL | real --prefer speed IN_REAL | real --tolerance x IN_REAL
        real --max-perplexity-increase nan IN_REAL | nope --json IN_REAL | nope --quiet IN_REAL
        nope -q IN_REAL | nope --verbose IN_REAL | nope -v IN_REAL
    """,
    "report": r"""
        nope | nope IN_REAL | real --out page.pdf IN_REAL | real --out folder IN_REAL
        real --out '' IN_REAL
        real --out file/page.html IN_REAL | real --out loop.html IN_REAL
        real --out loop/x.html IN_REAL | real --out pipe.html IN_REAL
        real -o page IN_REAL | real --out folder.html IN_REAL
        real --out LONG.html IN_REAL | real --prefer speed IN_REAL
        real --tolerance speed=2 IN_REAL
        real --max-perplexity-increase -1 IN_REAL | nope --storage sqlite:///garbage.db | nope more
        real --server nonsense | real --server http://host IN_REAL
    """,
    "plot": r"""
        nope | nope IN_REAL | real pie IN_REAL | real '' IN_REAL | real --out figure.pdf IN_REAL
        real --out figure IN_REAL
        real -o figure.gif IN_REAL | real --out '' IN_REAL | real --out folder.html IN_REAL
        real --width 800 IN_REAL
        real --out file/figure.html IN_REAL | real --out loop.html IN_REAL
        real --out loop/x.html IN_REAL
        real --out figure.png --width 0 IN_REAL
        real --out figure.png --width -5 IN_REAL | real --out figure.png --height 0 IN_REAL
        real --out figure.png --height 99999999999999999999 IN_REAL
        real --out figure.png --scale nan IN_REAL | real --out figure.png --scale 1000 IN_REAL
        real --out figure.png --scale -1 IN_REAL | real --out figure.png --scale inf IN_REAL
        real ladder --3d IN_REAL
        real --x loss IN_REAL | real --y loss IN_REAL | real --x speed --y speed IN_REAL
        real memory --x speed IN_REAL
        real --feasible IN_REAL | real --trials 1 IN_REAL | real --trial 3 IN_REAL
        real memory --trials '1;2' IN_REAL
        real memory --trials 99 IN_REAL | real memory --trials '' IN_REAL
        real memory --trials -1 IN_REAL
        real memory --trials 1,٢ IN_REAL | real timeline --trial 99 IN_REAL
        real timeline --trial x IN_REAL
        real --tolerance x IN_REAL | real --prefer x IN_REAL
        real --max-perplexity-increase nan IN_REAL
        real --server nonsense | real --server http://host IN_REAL
        real parity IN_REAL | nope --storage sqlite:///folder | real pareto more IN_REAL
    """,
    "compare": r"""
        nope | nope neither | real IN_REAL | real real IN_REAL | real nope IN_REAL
        real nope --out figure.gif IN_REAL
        real nope -o '' IN_REAL | real other --out f.html --width 5 IN_REAL
        real other --out f.html --height 5 IN_REAL
        real other --out f.html --scale 2 IN_REAL | real other --tolerance speed=9 IN_REAL
        real other --prefer x IN_REAL
        real other --max-perplexity-increase x IN_REAL | real other third --no-worse IN_REAL
        real --no-worse IN_REAL
        real nope --json IN_REAL | real nope --storage nonsense
        real other --out file/f.html IN_REAL
    """,
    "export": r"""
        real IN_REAL | nope --to pytorch | nope --to pytorch IN_REAL
        real --to tensorflow IN_REAL | real -t '' IN_REAL
        real --to pytorch --trial 99 IN_REAL | real --to pytorch --trial -1 IN_REAL
        real --to pytorch --trial x IN_REAL
        real --to pytorch --pick best IN_REAL | real --to pytorch --trial 0 --pick smallest IN_REAL
        real --to pytorch --target-version 0 IN_REAL | real --to pytorch --target-version '' IN_REAL
        real --to pytorch --out file IN_REAL | real --to pytorch --out loop IN_REAL
        real --to pytorch --out loop/x IN_REAL | real --to pytorch --out file/x IN_REAL
        real --to pytorch -o LONG IN_REAL
        real --to pytorch --out '' IN_REAL | real --to pytorch --tolerance x IN_REAL
        real --to pytorch --max-perplexity-increase nan IN_REAL
        real --to nope --strict --force --json IN_REAL
        real --into missing.yaml IN_REAL | real --into folder --in-place IN_REAL
        real --to pytorch --into missing.yaml IN_REAL | real --to pytorch --in-place IN_REAL
        real --to pytorch --server nonsense | real --to pytorch --server http://host IN_REAL
        real --to pytorch --storage nonsense | nope --to pytorch --storage sqlite:///garbage.db
    """,
    "studies": r"""
        --storage nonsense | --storage sqlite:///folder | --storage sqlite:///garbage.db
        --storage sqlite:///empty.db
        --storage sqlite:///missing.db | --storage '' | --bogus | surplus
        check --storage sqlite:///garbage.db | check --storage sqlite:///loop.db
        check --storage sqlite:///LONGNAME.db | check --storage sqlite:///missing.db | check nope
        check --bogus
        export | export nope | export nope --out studies.db --storage sqlite:///empty.db
        export --bogus nope
        export nope --out folder
        export nope --to-optuna sqlite:///optuna.db | export nope --to-optuna --out studies.db
        export real --out x.db --to-optuna sqlite:///optuna.db IN_REAL
        export real --to-optuna '' IN_REAL | export real --to-optuna optuna.db IN_REAL
        export real --to-optuna sqlite:// IN_REAL | export real --to-optuna redis://host IN_REAL
        export real --to-optuna sqlite:///garbage.db IN_REAL
        export real --to-optuna sqlite:///folder IN_REAL
        import | import missing.db | import garbage.toml | import empty.db
        import folder --name new | import pipe | import loop | import /dev/zero
        import ~nobody/x.db
        import garbage.toml --storage sqlite:///garbage.db | import missing.db --name a/b
        import --bogus
        trust | trust nope | trust nope --storage sqlite:///garbage.db | trust nope --bogus
        trust nope IN_REAL | trust 'a/b' IN_REAL
        --server nonsense | --server http://host IN_REAL | --server http://host check
    """,
    "serve": r"""
        --bogus | surplus | --port x | --port -1 | --port 65536 | --port '' | --port 1.5
        --host nonesuch.invalid | --host 'a b' | --host 192.0.2.1 --port 0
        --storage nonsense --port 0 | --storage sqlite:///loop.db --port 0
        --storage sqlite:///garbage.db --port 0
        --devices gpu | --devices 0 | --ray head | --ray ''
        --data-root missing | --data-root loop | --data-root file | --data-root / | --data-root ''
        --allow-code missing | --allow-code file | --allow-code /
        --allow-host http://host | --allow-host 'a b' | --allow-host '*' | --allow-host me@host
        --allow-host ''
        --internal-address nonsense | --internal-address '' | --internal-address ftp://host
        --root-path tune | --root-path http://host/tune | --root-path '/a b'
        --root-path /../tune | --root-path //tune
        --trust-user-header X-Forwarded-User | --trust-proxy 10.0.0.5
        --trust-user-header 'a b' --trust-proxy 10.0.0.5 | --trust-user-header ''
        --trust-user-header Cookie --trust-proxy 10.0.0.5 | --trust-proxy ''
        --trust-user-header X-User --trust-proxy proxy.lan | --trust-proxy 10.0.0.5/8
        --trust-user-header X-User --trust-proxy 0.0.0.0/0 | --trust-proxy ::/0
        --tls-certificate file | --tls-key file | --tls-certificate file --tls-key file
        --tls-certificate missing.pem --tls-key missing.pem
        --tls-certificate pipe --tls-key pipe
        --max-trials 0 | --max-trials x | --max-time soon | --max-time 0 | --keep 0 | --keep x
        --max-devices 0 | --max-devices x | --quota x | --quota 0
        --max-queued-per-person 0 | --max-running-per-person x
        --max-device-hours-per-person 40 | --max-device-hours-per-person 0/7d
        --max-device-hours-per-person 40/week | --max-device-hours-per-person 40/
        --max-device-hours-per-person 40/7d --ray auto
        --group left | --group left=gpu | --group left= | --group a=2 --group a=3
        --group a=2 --devices 2 | --group 'a b=2' | --group =2
        --webhook nonsense | --webhook ftp://host | --webhook http:// | --webhook ''
        --verbose --port x | -v --port x | --log-format xml | --log-format ''
        --time-limit soon | --no-worker --port x
        tokens bogus | tokens --bogus | tokens --storage nonsense | tokens add
        tokens --storage sqlite:///missing.db | tokens list --storage sqlite:///missing.db
        tokens add 'a b' IN_REAL | tokens add '' IN_REAL | tokens add owner --read-only IN_REAL
        tokens add a --webhook nonsense | tokens add a --webhook ftp://host
        tokens add a --role king | tokens add a --expires soon
        tokens add é IN_REAL | tokens add a --storage nonsense | tokens list surplus
        tokens list --storage nonsense | tokens list --bogus
        tokens remove | tokens remove nobody --storage sqlite:///missing.db
        tokens remove a --storage nonsense
    """,
    "worker": r"""
        --bogus | surplus | --port x | --port -1 | --host nonesuch.invalid | --host 192.0.2.1
        --storage nonsense | --storage sqlite:///loop.db | --storage sqlite:///garbage.db
        --devices gpu | --devices 0 | --ray head | --group left | --group a=2 --devices 2
        --data-root missing | --allow-code missing | --internal-address nonsense
        --time-limit soon | --time-limit 0 | --time-limit '' | --keep 0 | --quota x
        --log-format xml
    """,
    "submit": r"""
        --world-size 0
        --max-mem 8GiB | --server nonsense | --server '' --max-mem 8GiB | --bogus | surplus
        --server http://host --max-perplexity-increase -1 | --server http://host --prefer speed
        --server http://host --tolerance x | --json | --quiet | -q | --priority x | --group a
        --server http://host --kind '' | --server http://host --kind ' ' | --kind cpu
        --no-streaming --no-callback -m train.py
        --server http://host --from missing.yaml
        --server http://host --space garbage.toml | --server http://host --model garbage.toml
        --server http://host --model typo.json | --server http://host --space folder
    """
    + _OF_A_SEARCH,
    "queue": r"""
        --state nonsense --server http://host | --limit 0 --server http://host | --limit x
        --server nonsense | --json | surplus | --bogus
    """,
    "watch": r"""
        3 | 3 --server nonsense | --server http://host | 3 4 --server http://host
        3 --server http://host --prefer speed | 3 --server http://host --tolerance x
        3 --server http://host --max-perplexity-increase -1 | 3 --json | 3 --quiet | 3 -q
        3 --verbose | 3 -v
    """,
    "cancel": "3 | --server http://host | 3 --server nonsense",
    "doctor": "--device gpu | --device '' | --device cuda:x | --device | surplus | --ray head"
    " | --ray '' | --ray auto --device cpu",
}


LATE = {
    "search": r"""
        --device cuda:99 | --model own.py:build | --model raising.py:build
        --model nothing.py:build
        --model nonesuch_module:build | --model nosuch.json | --script ends.py
    """,
}
"""Mistakes that only torch can detect. They are rejected before anything is compiled or trained,
but not within a second."""


def mistakes(command_lines: Mapping[str, str] = COMMAND_LINES) -> Iterator[list[str]]:
    """Yield every command line of the table, without the name of the program."""
    for command, lines in command_lines.items():
        for line in lines.strip().replace("\n", " | ").split(" | "):
            yield [*([command] if command else []), *shlex.split(_spelled_out(line))]


def all_mistakes() -> Iterator[list[str]]:
    """Yield every command line that must be rejected at once, with those of datasets last."""
    yield from mistakes()
    for name in SPACES:
        yield ["search", "--space", space_file(name)]
    for name in DATASETS:
        yield ["search", *dataset_options(name)]


_SHORT = {"LONGNAME": "x" * 253, "IN_REAL": IN_REAL, "NAME_OF_101": "x" * 101, "LONG": "x" * 5000}


def _spelled_out(line: str) -> str:
    """Replace abbreviations and escapes by long texts and characters that no source file shows."""
    for short, long in _SHORT.items():
        line = line.replace(short, long)
    for written, letter in (
        ("\\n", "\n"),
        ("\\x1b", "\x1b"),
        ("\\x07", "\x07"),
        ("\\udcff", "\udcff"),
    ):
        line = line.replace(written, letter)
    return line
