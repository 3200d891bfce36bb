"""The code that trials and exported files share: what an export contains is what trials ran.

An export contains whole modules of this package, as text (`exporters/bundle.py`), and runs where
autotune is not installed. So a module here imports the standard library, torch, numpy and the
packages that an export may need, and otherwise only modules of this package. Two modules that are
in one export define no name twice. What an exporter writes for one configuration is declared in
`script/written.py`.
"""
