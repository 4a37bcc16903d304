//! Completions and manual pages, made from the command line's own definition.

use super::support::run;
use std::process::Command;

#[test]
fn every_shell_gets_a_script_that_knows_the_verbs_and_options() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = run(["completions", shell]).success();
        for word in ["serve", "explain", "capacity", "api-key-file"] {
            assert!(script.contains(word), "{shell} has no {word}");
        }
        assert!(
            !script.contains("bench-child"),
            "{shell} offers what is hidden"
        );
    }
    let folder = tempfile::tempdir().expect("folder");
    let file = folder.path().join("hotpin.bash");
    std::fs::write(&file, run(["completions", "bash"]).success()).expect("write");
    // What bash itself offers after `hotpin ser`.
    let line = format!(
        ". {}; COMP_WORDS=(hotpin ser); COMP_CWORD=1; _hotpin hotpin ser hotpin; echo \"${{COMPREPLY[@]}}\"",
        file.display()
    );
    let offered = Command::new("bash")
        .args(["-c", &line])
        .output()
        .expect("bash");
    assert_eq!(String::from_utf8_lossy(&offered.stdout).trim(), "serve");
    run(["completions", "tcsh"]).failure(2, &["tcsh"]);
}

#[test]
fn every_verb_has_a_manual_page() {
    let folder = tempfile::tempdir().expect("folder");
    let pages = folder.path().join("man/man1");
    run(["man", pages.to_str().expect("UTF-8")]).success();
    for verb in [
        "",
        "-run",
        "-serve",
        "-bench",
        "-top",
        "-config",
        "-config-init",
    ] {
        let name = format!("hotpin{verb}.1");
        let page = std::fs::read_to_string(pages.join(&name)).expect(&name);
        assert!(page.contains(".TH"), "{name}");
    }
    let serve = std::fs::read_to_string(pages.join("hotpin-serve.1")).expect("page");
    for words in ["drain", "HOTPIN_DRAIN_TIME", ".SH ENGINE"] {
        assert!(serve.contains(words), "{words}");
    }
    run(["man", "/proc/none"]).failure(1, &["/proc/none"]);
}
