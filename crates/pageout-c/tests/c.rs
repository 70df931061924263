//! Compiles a C program against the header and runs it on the shared and on the static library.

use std::env;
use std::path::PathBuf;
use std::process::{Command, Output};

const SKIPPED: i32 = 77;

/// Where cargo puts the libraries: beside this test.
fn libraries() -> PathBuf {
    let test = env::current_exe().unwrap();
    test.parent().unwrap().to_owned()
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn compile_and_run(name: &str, link: &[&str]) {
    let compiler = env::var("CC").unwrap_or_else(|_| "cc".into());
    if Command::new(&compiler).arg("--version").output().is_err() {
        println!("skipped: no C compiler ({compiler})");
        return;
    }
    let root = env!("CARGO_MANIFEST_DIR");
    let program = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let compiled = Command::new(&compiler)
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-I"])
        .arg(format!("{root}/include"))
        .arg(format!("{root}/tests/program.c"))
        .arg("-o")
        .arg(&program)
        .args(link)
        .args(["-lpthread", "-ldl", "-lm"])
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", said(&compiled));
    for argument in [None, Some("inline")] {
        // Ends it if it hangs.
        let ran = Command::new("timeout")
            .args(["-k", "5", "60"])
            .arg(&program)
            .args(argument)
            // Where cargo says there may be an older one.
            .env_remove("LD_LIBRARY_PATH")
            .output()
            .unwrap();
        if ran.status.code() == Some(SKIPPED) {
            println!("{}", said(&ran));
            continue;
        }
        assert!(ran.status.success(), "{argument:?}: {}: {}", ran.status, said(&ran));
    }
}

#[test]
fn on_the_shared_library() {
    let at = libraries();
    let (search, path) = (format!("-L{}", at.display()), format!("-Wl,-rpath,{}", at.display()));
    compile_and_run("program-shared", &[&search, "-lpageout_c", &path]);
}

#[test]
fn on_the_static_library() {
    let library = libraries().join("libpageout_c.a");
    compile_and_run("program-static", &[library.to_str().unwrap()]);
}
