"""`v4mesh completion bash|zsh|fish`: the script that makes a shell complete commands, flags and values."""

import click
from click.shell_completion import get_completion_class

from meshkit.cli.help_pages import command

WHERE = {
    "bash": 'eval "$(v4mesh completion bash)"    # in ~/.bashrc',
    "zsh": 'eval "$(v4mesh completion zsh)"    # in ~/.zshrc, after compinit',
    "fish": "v4mesh completion fish > ~/.config/fish/completions/v4mesh.fish",
}


@command()
@click.argument("shell", type=click.Choice(list(WHERE)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> int:
    """Print the completion script of SHELL: bash 4.4 or newer, zsh or fish."""
    kind = get_completion_class(shell)
    assert kind is not None, shell
    root = ctx.find_root().command
    script = kind(root, {}, "v4mesh", "_V4MESH_COMPLETE")
    click.echo(f"# {WHERE[shell]}\n{script.source_template % script.source_vars()}")
    return 0
