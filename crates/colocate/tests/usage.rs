//! Bad usage exits with 2, bad files with 1, and both say what is wrong on standard error alone.

#![allow(clippy::unwrap_used)]

mod common;
use common::{calibration_file, run, stderr, stdout};

#[test]
fn bad_usage_exits_with_2() {
    let cases: &[(&[&str], &str)] = &[
        (&[], "Usage"),
        (&["dance"], "unrecognized subcommand"),
        (&["demo", "--policies", "fastest"], "fastest"),
        (&["demo", "--policies", "random,random"], "twice"),
        (
            &["demo", "--workload", "chat"],
            "expected task, language or mixed",
        ),
        (&["demo", "--rate", "0"], "expected a number above 0"),
        (
            &["demo", "--rate", "5", "--concurrency", "8"],
            "cannot be used with",
        ),
        (&["demo", "--decode-workers", "0"], "--decode-workers"),
        (&["demo", "--expert-padding", "0"], "--expert-padding"),
        (&["demo", "--tau", "2"], "--tau"),
        (&["demo", "--tau", "-1"], "expected a number from 0 to 1"),
        (
            &["demo", "--max-load", "-1"],
            "expected a number of 1 or more",
        ),
        (
            &["up", "--max-load", "inf"],
            "expected a number of 1 or more",
        ),
        (
            &["demo", "--min-coverage", "2"],
            "expected a number from 0 to 1",
        ),
        (
            &["serve", "--probe-timeout", "0"],
            "expected seconds from 0.001",
        ),
        (
            &["serve", "--drain-timeout", "-1"],
            "expected seconds from 0.001",
        ),
        (&["serve", "--max-in-flight", "0"], "--max-in-flight"),
        (&["demo", "--model", "/nowhere"], "expected a model folder"),
        (&["up", "--model", "/nowhere"], "expected a model folder"),
        (&["worker"], "--model"),
        (
            &["worker", "--model", "/nowhere", "--role", "leader"],
            "leader",
        ),
        (
            &["worker", "--model", "/nowhere"],
            "expected a model folder",
        ),
        (&["serve", "--prefill", "http://127.0.0.1:1"], "--decode"),
        (
            &[
                "serve",
                "--prefill",
                "nonsense",
                "--decode",
                "http://127.0.0.1:1",
            ],
            "nonsense",
        ),
        (
            &[
                "serve",
                "--prefill",
                "http://127.0.0.1:1",
                "--decode",
                "http://127.0.0.1:2",
                "--decode-policy",
                "locality",
            ],
            "--locality-map",
        ),
        (&["calibrate", "--prompts", "p", "--out", "o"], "--url"),
        (
            &[
                "calibrate",
                "--url",
                "u",
                "--model",
                "m",
                "--prompts",
                "p",
                "--out",
                "o",
            ],
            "cannot be used with",
        ),
        (
            &["fit", "c.jsonl", "--out", "m", "--clusters", "0"],
            "--clusters",
        ),
        (
            &[
                "fit",
                "c.jsonl",
                "--out",
                "m",
                "--clusters",
                "2",
                "--transform",
                "cube",
            ],
            "cube",
        ),
        (&["inspect"], "FILE"),
    ];
    for (arguments, expected) in cases {
        let output = run(*arguments);
        assert_eq!(
            output.status.code(),
            Some(2),
            "{arguments:?}: {}",
            stderr(&output)
        );
        assert!(
            stderr(&output).contains(expected),
            "{arguments:?}: {}",
            stderr(&output)
        );
        assert_eq!(stdout(&output), "", "{arguments:?}");
    }
}

#[test]
fn help_is_there_for_every_command() {
    for command in [
        "demo",
        "up",
        "worker",
        "serve",
        "calibrate",
        "fit",
        "inspect",
    ] {
        let output = run([command, "--help"]);
        assert_eq!(output.status.code(), Some(0));
        assert!(stdout(&output).contains("Usage: colocate"), "{command}");
    }
}

#[test]
fn bad_files_exit_with_1_and_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("garbage"), b"\x00\x01garbage").unwrap();
    std::fs::write(path("empty"), b"").unwrap();
    std::fs::write(
        path("prompts.jsonl"),
        "{\"prompt\":\"a\"}\n{\"text\":\"b\"}\n",
    )
    .unwrap();
    let good = calibration_file(folder.path(), 8, 2);
    let text = std::fs::read_to_string(&good).unwrap();
    std::fs::write(path("cut.jsonl"), &text[..text.len() - 40]).unwrap();
    std::fs::write(
        path("newer.jsonl"),
        text.replacen("\"version\":1", "\"version\":9", 1),
    )
    .unwrap();
    let out = path("map.safetensors");
    let cases: Vec<(Vec<String>, &str)> = vec![
        (
            vec![
                "fit".into(),
                path("missing"),
                "--out".into(),
                out.clone(),
                "--clusters".into(),
                "2".into(),
            ],
            "missing",
        ),
        (
            vec![
                "fit".into(),
                path("empty"),
                "--out".into(),
                out.clone(),
                "--clusters".into(),
                "2".into(),
            ],
            "empty file",
        ),
        (
            vec![
                "fit".into(),
                path("cut.jsonl"),
                "--out".into(),
                out.clone(),
                "--clusters".into(),
                "2".into(),
            ],
            "line 9",
        ),
        (
            vec![
                "fit".into(),
                path("newer.jsonl"),
                "--out".into(),
                out.clone(),
                "--clusters".into(),
                "2".into(),
            ],
            "version",
        ),
        (
            vec![
                "fit".into(),
                path("calibration.jsonl"),
                "--out".into(),
                out.clone(),
                "--clusters".into(),
                "9".into(),
            ],
            "9",
        ),
        (
            vec![
                "fit".into(),
                path("calibration.jsonl"),
                "--out".into(),
                path("no/such/folder"),
                "--clusters".into(),
                "2".into(),
            ],
            "no/such/folder",
        ),
        (vec!["inspect".into(), path("missing")], "missing"),
        (vec!["inspect".into(), path("garbage")], "garbage"),
        (vec!["inspect".into(), path("empty")], "empty"),
        (
            vec![
                "calibrate".into(),
                "--url".into(),
                "http://127.0.0.1:9".into(),
                "--prompts".into(),
                path("prompts.jsonl"),
                "--out".into(),
                path("o"),
            ],
            "line 2",
        ),
    ];
    for (arguments, expected) in cases {
        let output = run(&arguments);
        assert_eq!(
            output.status.code(),
            Some(1),
            "{arguments:?}: {}",
            stderr(&output)
        );
        assert!(
            stderr(&output).contains(expected),
            "{arguments:?}: {}",
            stderr(&output)
        );
        assert_eq!(stdout(&output), "", "{arguments:?}");
    }
    assert!(!std::path::Path::new(&out).exists());
}

#[test]
fn a_worker_that_is_not_there_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let prompts = folder.path().join("prompts.jsonl");
    std::fs::write(&prompts, "{\"prompt\":\"a\"}\n").unwrap();
    let output = run([
        "calibrate",
        "--url",
        "http://127.0.0.1:9",
        "--prompts",
        prompts.to_str().unwrap(),
        "--out",
        folder.path().join("out").to_str().unwrap(),
    ]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("cannot reach http://127.0.0.1:9/v1/models"),
        "{}",
        stderr(&output)
    );
}
