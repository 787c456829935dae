"""One complete turn and the history before it, for the tests of what handles turns."""

from compeer_core.dialogue import Dialogue

TEXT = (
    "<history>Work is too much.\nStage: Exploration</history>\n"
    "<emotion>Worn out.\nSentiment: Negative\nEmotion: Anxiety\nIntensity: 4</emotion>\n"
    "<strategy>Ask first.\nStrategy: Question</strategy>\n"
    "<reply>What happened today?</reply>"
)
DIALOGUE = Dialogue.from_messages([{"role": "user", "content": "I cannot go on like this."}])
