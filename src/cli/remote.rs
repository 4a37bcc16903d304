//! `hotpin top` and `hotpin explain`: a look at a server that runs.

use super::common::{self, Usage};
use crate::config::Config;
use crate::config::args::KeyArgs;
use crate::top::{Client, show};
use anyhow::Result;
use clap::Args;
use std::io::IsTerminal;
use std::net::IpAddr;
use std::process::ExitCode;

/// Which server, and the key to it.
#[derive(Debug, Args)]
pub(super) struct RemoteArgs {
    /// The server [default: on this machine, at the port of the settings file or 8080]
    #[arg(long, env = "HOTPIN_SERVER", value_name = "URL")]
    server: Option<String>,
    #[command(flatten)]
    key: KeyArgs,
}

#[derive(Debug, Args)]
pub(super) struct ExplainArgs {
    /// The MoE layer, from 0
    layer: usize,
    /// The expert's index in it, from 0
    expert: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    remote: RemoteArgs,
}

impl RemoteArgs {
    fn client(&self, config: &Config) -> Result<Client> {
        let url = match &self.server {
            Some(url) if url.starts_with("http://") => url.clone(),
            Some(url) => {
                let why = format!("--server {url}: a URL such as http://127.0.0.1:8080 is meant");
                return Err(Usage(why).into());
            }
            None => local(config),
        };
        Ok(Client::new(&url, self.key.text()?))
    }
}

/// The server that the settings file describes.
fn local(config: &Config) -> String {
    let given = |key: &str| {
        let given = config.given().iter().rfind(|one| one.key == key)?;
        given.values.first().map(String::as_str)
    };
    let host: Option<IpAddr> = given("server.host")
        .and_then(|host| host.parse().ok())
        .filter(|host: &IpAddr| !host.is_unspecified());
    let port = given("server.port").unwrap_or("8080");
    match host {
        Some(IpAddr::V6(host)) => format!("http://[{host}]:{port}"),
        Some(IpAddr::V4(host)) => format!("http://{host}:{port}"),
        None => format!("http://127.0.0.1:{port}"),
    }
}

pub(super) fn top(args: &RemoteArgs, config: &Config) -> Result<ExitCode> {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        let why = "top needs a terminal; /api/state has the same as JSON";
        return Err(Usage(why.to_owned()).into());
    }
    show(&args.client(config)?)?;
    Ok(ExitCode::SUCCESS)
}

pub(super) fn explain(args: &ExplainArgs, config: &Config) -> Result<ExitCode> {
    let path = format!("/api/explain/{}/{}", args.layer, args.expert);
    let answer: serde_json::Value = args.remote.client(config)?.get(&path)?;
    common::say(&if args.json {
        serde_json::to_string_pretty(&answer)?
    } else {
        answer["text"].as_str().unwrap_or_default().to_owned()
    })?;
    Ok(ExitCode::SUCCESS)
}
