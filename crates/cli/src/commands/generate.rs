//! `ginnel generate`: writes the manual pages and the completions of shells from the definition of the
//! command line, for packages.

use crate::Cli;
use crate::failure::Failure;
use clap::{Args, CommandFactory};
use clap_complete::Shell;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Options of `ginnel generate`.
#[derive(Clone, Debug, Args)]
pub struct GenerateOptions {
    /// Directory for man/*.1, ginnel.bash, _ginnel (zsh) and ginnel.fish.
    #[arg(value_name = "DIRECTORY")]
    directory: PathBuf,
}

/// Writes the files.
pub fn run(options: &GenerateOptions) -> Result<(), Failure> {
    let directory = &options.directory;
    generate(directory).map_err(|e| Failure::running(format!("{}: {e}", directory.display())))
}

fn generate(directory: &Path) -> io::Result<()> {
    let pages = directory.join("man");
    fs::create_dir_all(&pages)?;
    let command = public(Cli::command());
    clap_mangen::generate_to(command.clone(), &pages)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut command.clone(), "ginnel", directory)?;
    }
    Ok(())
}

/// Returns the command without its hidden subcommands.
fn public(command: clap::Command) -> clap::Command {
    let shown: Vec<clap::Command> =
        command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set()).cloned().collect();
    let about = command.get_about().cloned().unwrap_or_default();
    clap::Command::new("ginnel")
        .version(env!("CARGO_PKG_VERSION"))
        .about(about)
        .disable_help_subcommand(true)
        .subcommand_required(true)
        .subcommands(shown)
}
