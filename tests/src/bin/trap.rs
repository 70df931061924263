//! `trap NAME [--size 256M] [--seconds 1] [--threads 2] [WORD...]`: runs one trap; `trap list` names them.

use pageout_tests::trap::{self, Ctx, Stop};
use pageout_tests::units;
use std::process::ExitCode;
use std::time::Duration;

const USAGE: &str = "usage: trap NAME [--size 256M] [--seconds 1] [--threads 2] [WORD...], or trap list";

fn main() -> ExitCode {
    // In a thread, which others may wait for, or in a fork's child: it must not go on from where its parent called.
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        tell(info);
        std::process::abort();
    }));
    let mut words = std::env::args().skip(1);
    let Some(name) = words.next() else { return usage("no trap was named") };
    if name == "list" {
        for trap in trap::ALL.iter().copied().flatten() {
            println!("{:24} {}", trap.name, trap.about);
        }
        return ExitCode::SUCCESS;
    }
    let Some(trap) = trap::find(&name) else { return usage(&format!("no trap is called {name}")) };
    let ctx = match parse(words) {
        Ok(ctx) => ctx,
        Err(why) => return usage(&why),
    };
    match (trap.run)(&ctx) {
        Ok(()) => println!("ok"),
        Err(Stop::Skip(why)) => println!("skip: {why}"),
        Err(Stop::Wrong(why)) => {
            println!("wrong: {name}: {why}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Ctx, String> {
    let mut ctx = Ctx { size: 256 << 20, time: Duration::from_secs(1), threads: 2, args: Vec::new() };
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} takes a value"));
        match word.as_str() {
            "--size" => ctx.size = units::parse_size(&value()?).ok_or("--size takes a size as 256M")?,
            "--seconds" => {
                let seconds = value()?.parse().map_err(|_| "--seconds takes a number")?;
                ctx.time = Duration::try_from_secs_f64(seconds).map_err(|e| e.to_string())?;
            }
            "--threads" => ctx.threads = value()?.parse().map_err(|_| "--threads takes a number")?,
            _ => ctx.args.push(word),
        }
    }
    Ok(ctx)
}

fn usage(why: &str) -> ExitCode {
    eprintln!("trap: {why}\n{USAGE}");
    ExitCode::from(2)
}
