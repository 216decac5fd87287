//! What the tests of the real binary share.

#![allow(clippy::unwrap_used, dead_code)]

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::OnceLock,
};

use experts::{
    CalibrationFile, CalibrationHeader, CalibrationRecord, ExpertCounts, ModelShape, PromptCounts,
};

/// The program, not yet started.
pub(crate) fn colocate() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_colocate"));
    command.env_remove("RUST_LOG");
    command
}

/// Runs the program to its end.
pub(crate) fn run<I: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = I>) -> Output {
    colocate().args(arguments).output().unwrap()
}

/// Standard output as text.
pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Standard error as text.
pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The one JSON object on standard output; panics with standard error when the exit code is another.
pub(crate) fn json(output: &Output, code: i32) -> serde_json::Value {
    assert_eq!(output.status.code(), Some(code), "{}", stderr(output));
    let text = stdout(output);
    assert_eq!(text.lines().count(), 1, "{text}");
    serde_json::from_str(&text).unwrap()
}

/// A small calibration: `groups` kinds of requests, each with experts of its own that decoding uses again.
pub(crate) fn calibration(records: usize, groups: usize) -> CalibrationFile {
    let shape = ModelShape {
        layers: 3,
        experts: 16,
        top_k: 2,
    };
    let records = (0..records)
        .map(|index| {
            let group = index % groups;
            let tokens = |count: usize, salt: usize| {
                let mut counts = ExpertCounts::zeros(shape);
                for token in 0..count {
                    for layer in 0..3 {
                        // Mostly the group's own pair of experts, now and then another one.
                        let own = (group * 2 + layer) % 16;
                        let other = if (token + salt + index).is_multiple_of(4) {
                            (own + 5 + token * 3 + index) % 16
                        } else {
                            (own + 1) % 16
                        };
                        let other = if other == own { (own + 1) % 16 } else { other };
                        counts.record(layer, &[own as u16, other as u16]).unwrap();
                    }
                }
                counts
            };
            let prompt = PromptCounts::new(tokens(24, 0), 24).unwrap();
            let mut record = CalibrationRecord::new(prompt, Some(tokens(12, 1)));
            record.domain = Some(format!("group-{group}"));
            record.workload = Some("task".into());
            record
        })
        .collect();
    CalibrationFile {
        header: CalibrationHeader::new("made-up", shape),
        records,
    }
}

/// Writes a calibration into `folder`.
pub(crate) fn calibration_file(folder: &Path, records: usize, groups: usize) -> PathBuf {
    let path = folder.join("calibration.jsonl");
    std::fs::write(&path, calibration(records, groups).to_jsonl().unwrap()).unwrap();
    path
}

/// A tiny random model with prompts of its own, made once per test program.
pub(crate) fn model() -> &'static str {
    static MODEL: OnceLock<String> = OnceLock::new();
    MODEL.get_or_init(|| {
        let model = Path::new(env!("CARGO_TARGET_TMPDIR")).join("tiny");
        let prompts = model.join("prompts");
        std::fs::create_dir_all(&prompts).unwrap();
        engine::testing::write_random_checkpoint(
            &model,
            &engine::testing::RandomModel::default(),
            1,
        )
        .unwrap();
        for (name, first) in [("calibration", 0), ("evaluation", 100)] {
            let lines: Vec<String> = (first..first + 40).map(prompt_line).collect();
            std::fs::write(prompts.join(format!("{name}.jsonl")), lines.concat()).unwrap();
        }
        model.to_str().unwrap().to_owned()
    })
}

/// Line `index` of a prompt file: four domains, each with letters of its own.
fn prompt_line(index: usize) -> String {
    let (domain, workload, letters) = [
        ("code", "task", "(){};="),
        ("law", "task", "lawcourt"),
        ("fr", "language", "éèàçô"),
        ("fi", "language", "äöyykk"),
    ][index % 4];
    let letters: Vec<char> = letters.chars().collect();
    let text: String = (0..40)
        .map(|at| letters[(at * 7 + index * 3 + at * at * index) % letters.len()])
        .collect();
    format!(
        "{}\n",
        serde_json::json!({"prompt": text, "domain": domain, "workload": workload})
    )
}

/// Ids of the living children of a process.
pub(crate) fn children(parent: u32) -> Vec<u32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse::<u32>().ok())
        else {
            continue;
        };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else {
            continue;
        };
        // pid (name) state ppid ...; the name may hold spaces.
        let Some((_, rest)) = stat.rsplit_once(')') else {
            continue;
        };
        let mut fields = rest.split_whitespace();
        let state = fields.next();
        if fields.next().and_then(|field| field.parse().ok()) == Some(parent) && state != Some("Z")
        {
            found.push(pid);
        }
    }
    found
}

/// Whether a process is there and no zombie.
pub(crate) fn alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .ok()
        .and_then(|stat| {
            stat.rsplit_once(')')
                .map(|(_, rest)| !rest.trim_start().starts_with('Z'))
        })
        .unwrap_or(false)
}

/// Sends a signal by its name.
pub(crate) fn signal(pid: u32, name: &str) {
    assert!(
        Command::new("kill")
            .args([format!("-{name}"), pid.to_string()])
            .status()
            .unwrap()
            .success()
    );
}
