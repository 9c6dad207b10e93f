//! Minimizes a failing input of a fuzz target and prints what happens: `replay TARGET FILE`. Writes the
//! minimized input to the file's name with `.min` appended.

use ginnel_fuzzing::{TARGETS, frames, inputs};
use std::panic::{catch_unwind, set_hook, take_hook};

fn main() {
    let mut args = std::env::args().skip(1);
    let (Some(name), Some(file)) = (args.next(), args.next()) else {
        eprintln!("usage: replay TARGET FILE");
        std::process::exit(2);
    };
    let Some(target) = TARGETS.iter().find(|t| t.name == name) else {
        let names: Vec<_> = TARGETS.iter().map(|t| t.name).collect();
        eprintln!("unknown target {name}; the targets are {}", names.join(", "));
        std::process::exit(2);
    };
    let data = std::fs::read(&file).unwrap_or_else(|e| panic!("{file}: {e}"));
    let message = |data: &[u8]| {
        let error = catch_unwind(|| (target.run)(data)).err()?;
        let text = error.downcast_ref::<String>().cloned();
        let text = text.or_else(|| error.downcast_ref::<&str>().map(|s| (*s).into())).unwrap_or_default();
        // Numbers in a message change while an input shrinks; the rest must stay equal.
        Some(text.chars().filter(|c| !c.is_ascii_digit()).take(60).collect::<String>())
    };
    let hook = take_hook();
    set_hook(Box::new(|_| {}));
    let data = match message(&data) {
        None => data,
        Some(reason) => {
            let minimized =
                inputs::shrink(data, frames::word::WORD_BYTES, |d| message(d).as_ref() == Some(&reason));
            let path = format!("{file}.min");
            std::fs::write(&path, &minimized).unwrap_or_else(|e| panic!("{path}: {e}"));
            println!("{path}: {} bytes", minimized.len());
            minimized
        }
    };
    set_hook(hook);
    if name == "frames" {
        frames::run_traced(&data, Some(|text| println!("{text}")));
    } else {
        println!("{}", data.escape_ascii());
        (target.run)(&data);
    }
    println!("the input passes");
}
