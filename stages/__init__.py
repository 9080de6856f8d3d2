"""One plain function for each stage of the graph: graph values in, graph values out.

The nodes call them inside ComfyUI, `magi2 run` calls the same ones without it. Nothing here imports ComfyUI; what a
stage needs from its surroundings (folders, progress, cancel) is given to it.
"""
