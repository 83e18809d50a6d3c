//! Has a model answer with JSON that satisfies a schema: `cargo run --release -p refrain --example extract -- [MODEL.gguf]`.

use refrain::{Builtin, Finish, Generate, GrammarSource, Model, Prompt, Session, SessionOptions};

const SCHEMA: &str = r#"{
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "animal": {"enum": ["cat", "dog", "bird"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30}
    },
    "required": ["name", "animal", "age"],
    "additionalProperties": false
}"#;

fn main() -> Result<(), refrain::Error> {
    let model = match std::env::args().nth(1) {
        Some(path) => Model::open(path)?,
        None => Builtin::Stories.open()?,
    };
    let grammar = model.grammar(&GrammarSource::JsonSchema(SCHEMA.into()))?;
    let mut session = Session::new(&model, &SessionOptions::default())?;
    let options = Generate { grammar: Some(grammar), max_tokens: Some(100), ..Generate::default() };
    let mut reply =
        session.generate(Prompt::Text("Tom had a little dog. As JSON, the pet is: "), &options)?;
    for delta in reply.by_ref() {
        print!("{}", delta?.text);
    }
    println!();
    match reply.summary().finish {
        Some(Finish::Complete | Finish::EndOfTurn) => {}
        finish => println!("incomplete: {finish:?}"),
    }
    Ok(())
}
