//! The demo's cluster on a real model: outputs, exit codes, and nothing left behind.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod common;
use std::{
    io::{BufRead, BufReader},
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use common::{alive, children, colocate, json, model, run, signal};

/// Arguments for a small demo.
const SMALL: [&str; 10] = [
    "--decode-workers",
    "2",
    "--requests",
    "12",
    "--max-tokens",
    "12",
    "--rounds",
    "1",
    "--short",
    "--json",
];

fn wait_for<T>(what: &str, limit: Duration, mut found: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(
            began.elapsed() < limit,
            "{what} did not happen within {limit:?}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits for processes to be gone: one that is killed may outlive the kill by a moment.
fn wait_until_gone(workers: &[u32]) {
    wait_for("the end of the workers", Duration::from_secs(5), || {
        workers.iter().all(|&worker| !alive(worker)).then_some(())
    });
}

/// Starts a demo and waits until all its workers are there.
fn started_demo() -> (Child, Vec<u32>) {
    let mut demo = colocate()
        .args([
            "demo",
            "--decode-workers",
            "2",
            "--rounds",
            "50",
            "--model",
            model(),
        ])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let workers = wait_for("four workers", Duration::from_secs(30), || {
        assert!(demo.try_wait().unwrap().is_none(), "the demo ended early");
        Some(children(demo.id())).filter(|found| found.len() == 4)
    });
    (demo, workers)
}

#[test]
fn a_small_demo_runs_and_its_outputs_agree() {
    let report = json(&run(["demo", "--model", model()].iter().chain(&SMALL)), 0);
    assert_eq!(report["outputs_identical"], true);
    assert_eq!(report["decode_workers"], 2);
    let policies: Vec<&str> = report["policies"]
        .as_array()
        .unwrap()
        .iter()
        .map(|line| line["policy"].as_str().unwrap())
        .collect();
    assert_eq!(
        policies,
        [
            "round_robin",
            "least_loaded",
            "power_of_two",
            "domain",
            "locality"
        ]
    );
    for line in report["policies"].as_array().unwrap() {
        assert_eq!(line["failed"], 0, "{line}");
        assert!(line["tpot_p50_ms"].as_f64().unwrap() > 0.0, "{line}");
        assert!(
            line["distinct_experts_per_layer_step"].as_f64().unwrap() >= 1.0,
            "{line}"
        );
    }
}

#[test]
fn an_open_loop_and_padding_are_shown() {
    let report = json(
        &run([
            "demo",
            "--model",
            model(),
            "--decode-workers",
            "1",
            "--requests",
            "6",
            "--max-tokens",
            "8",
            "--short",
            "--rate",
            "20",
            "--expert-padding",
            "2",
            "--policies",
            "random",
            "--workload",
            "task",
            "--seed",
            "5",
            "--json",
        ]),
        0,
    );
    assert_eq!(report["rate"], 20.0);
    assert_eq!(report["expert_padding"], 2);
    assert_eq!(report["seed"], 5);
    assert_eq!(
        report["policies"][0]["distinct_experts_vs_round_robin_pct"],
        serde_json::Value::Null
    );
}

#[test]
fn nothing_is_left_behind_after_signals() {
    for name in ["INT", "TERM"] {
        let (mut demo, workers) = started_demo();
        std::thread::sleep(Duration::from_millis(if name == "INT" { 0 } else { 1500 }));
        signal(demo.id(), name);
        let status = wait_for("the end of the demo", Duration::from_secs(10), || {
            demo.try_wait().unwrap()
        });
        assert_eq!(status.code(), Some(1), "{name}");
        wait_until_gone(&workers);
    }
}

#[test]
fn nothing_is_left_behind_when_the_parent_is_killed() {
    let (mut demo, workers) = started_demo();
    demo.kill().unwrap();
    demo.wait().unwrap();
    wait_for("the end of all workers", Duration::from_secs(8), || {
        workers.iter().all(|&worker| !alive(worker)).then_some(())
    });
}

#[test]
fn a_worker_that_dies_fails_the_demo_and_is_named() {
    let (mut demo, workers) = started_demo();
    std::thread::sleep(Duration::from_millis(1000));
    signal(workers[0], "KILL");
    let status = wait_for("the end of the demo", Duration::from_secs(60), || {
        demo.try_wait().unwrap()
    });
    assert_eq!(status.code(), Some(1));
    let errors = std::io::read_to_string(demo.stderr.take().unwrap()).unwrap();
    assert!(errors.contains("ended with signal: 9"), "{errors}");
    wait_until_gone(&workers);
}

#[test]
fn up_serves_until_it_is_told_to_stop() {
    let mut up = colocate()
        .args([
            "up",
            "--decode-workers",
            "2",
            "--port",
            "0",
            "--decode-policy",
            "least_loaded",
            "--json",
        ])
        .args(["--model", model()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(up.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let ready: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert!(
        ready["url"]
            .as_str()
            .unwrap()
            .starts_with("http://127.0.0.1:")
    );
    let workers = children(up.id());
    assert_eq!(workers.len(), 3);
    signal(up.id(), "INT");
    let status = wait_for("the end", Duration::from_secs(10), || {
        up.try_wait().unwrap()
    });
    assert_eq!(status.code(), Some(0));
    wait_until_gone(&workers);
}

#[test]
fn calibrates_through_a_worker_and_by_a_model() {
    let folder = tempfile::tempdir().unwrap();
    let prompts = folder.path().join("prompts.jsonl");
    std::fs::write(
        &prompts,
        "{\"prompt\":\"The court held that\",\"domain\":\"law\"}\n{\"prompt\":\"def main():\",\"domain\":\"code\"}\n",
    )
    .unwrap();
    let arguments = |out: &std::path::Path| {
        [
            "--prompts",
            prompts.to_str().unwrap(),
            "--out",
            out.to_str().unwrap(),
            "--max-tokens",
            "8",
            "--json",
        ]
        .map(str::to_owned)
    };
    let (by_model, by_url) = (folder.path().join("a.jsonl"), folder.path().join("b.jsonl"));
    let report = json(
        &colocate()
            .args(["calibrate", "--model", model()])
            .args(arguments(&by_model))
            .output()
            .unwrap(),
        0,
    );
    assert_eq!(report["records"], 2);

    let mut worker = colocate()
        .args([
            "worker",
            "--model",
            model(),
            "--port",
            "0",
            "--json",
            "--exit-with-parent",
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(worker.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let url = serde_json::from_str::<serde_json::Value>(&line).unwrap()["url"]
        .as_str()
        .unwrap()
        .to_owned();
    json(
        &colocate()
            .args(["calibrate", "--url", &url])
            .args(arguments(&by_url))
            .output()
            .unwrap(),
        0,
    );
    drop(worker.stdin.take());
    wait_for("the worker's end", Duration::from_secs(8), || {
        worker.try_wait().unwrap()
    });
    assert_eq!(
        std::fs::read(by_model).unwrap(),
        std::fs::read(by_url).unwrap()
    );
}
