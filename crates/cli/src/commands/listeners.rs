//! `ginnel listeners`: shows which worker has which listener under `ginnel run --stack kernel
//! --listen-spawn`.

use crate::failure::Failure;
use crate::output;
use clap::Args;
use ginnel_kernel_lane::report::{self, ListenerProcess, WorkerListener};
use serde_json::json;

/// Options of `ginnel listeners`.
#[derive(Clone, Debug, Args)]
pub struct ListenersOptions {
    /// Show only the program that this process belongs to.
    #[arg(value_name = "PID")]
    pid: Option<u32>,

    /// Print a JSON object per line for each worker and listener.
    #[arg(long)]
    json: bool,
}

/// Prints the listeners.
pub fn run(options: &ListenersOptions) -> Result<(), Failure> {
    let which = options.pid.map_or_else(|| "/proc".to_owned(), |pid| format!("process {pid}"));
    let rows = report::all(options.pid).map_err(|e| Failure::running(format!("{which}: {e}")))?;
    if rows.is_empty() {
        let which =
            options.pid.map_or_else(|| "no program has".to_owned(), |pid| format!("process {pid} has no"));
        return Err(Failure::running(format!(
            "{which} listeners of workers: start a server with \"ginnel run --stack kernel --listen-spawn auto\""
        )));
    }
    let text: String = if options.json {
        rows.iter().map(|row| format!("{}\n", as_json(row))).collect()
    } else {
        let heads = ["LISTENER", "MASTER", "WORKER", "CPU", "ACCEPTED"].map(str::to_owned);
        let lines = core::iter::once(heads).chain(rows.iter().map(cells));
        lines
            .map(|[address, master, worker, cpu, accepted]| {
                format!("{address:<24} {master:>8} {worker:>8} {cpu:>4} {accepted:>10}\n")
            })
            .collect()
    };
    output::print(&text)
}

fn cells(row: &WorkerListener) -> [String; 5] {
    let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    [
        row.address.to_string(),
        describe(row.master),
        or_dash(row.worker.map(describe)),
        or_dash(row.cpu.map(|cpu| cpu.to_string())),
        row.accepted.to_string(),
    ]
}

fn describe(process: ListenerProcess) -> String {
    match process {
        ListenerProcess::Id(pid) => pid.to_string(),
        ListenerProcess::Hidden => "hidden".to_owned(),
        ListenerProcess::Ended => "ended".to_owned(),
    }
}

fn process_as_json(process: ListenerProcess) -> serde_json::Value {
    match process {
        ListenerProcess::Id(pid) => json!(pid),
        ListenerProcess::Hidden | ListenerProcess::Ended => json!(describe(process)),
    }
}

fn as_json(row: &WorkerListener) -> serde_json::Value {
    json!({
        "listener": row.address.to_string(),
        "master": process_as_json(row.master),
        "worker": row.worker.map(process_as_json),
        "cpu": row.cpu,
        "accepted": row.accepted,
    })
}
