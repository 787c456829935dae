"""The public files of the corpora are read whole."""

import pytest

from tests.training.cer.corpora.corpus_files import load
from training.cer.records import Reason

DROPS = {
    "cpsycoun_d": {Reason.EMPTY_UTTERANCE},
    "dailydialog": {Reason.UNKNOWN_EMOTION},
    "annomi": {Reason.REPEATED},
    "counselchat": {Reason.NO_PARTNER},
}
"""What may be left out; the numbers below say that it is not much."""


@pytest.mark.parametrize(
    ("name", "file", "dialogues", "utterances"),
    [
        ("esconv", "esconv/train.txt.gz", 910, 26_648),
        ("esconv", "esconv/valid.txt.gz", 195, 5_678),
        ("esconv", "esconv/test.txt.gz", 156, 4_867),
        ("esconv_multiesc", "esconv/multiesc_valid.txt.gz", 195, 4_467),
        ("esconv_multiesc", "esconv/multiesc_test.txt.gz", 156, 3_802),
        ("esconv_original", "esconv/FailedESConv.json.gz", 157, 4_245),
        # one dialogue per line of the file
        ("esconv_windows", "esconv/thu-coai_devWithStrategy_short.tsv.gz", 2_797, None),
        ("escot", "escot/data/val.json.gz", 172, 4_166),
        ("escot", "escot/data/test.json.gz", 273, 6_666),
        # the replies are not among the 27,952 lines of input
        (
            "escot_chain",
            "escot/data/ablation_data/em_sr_re/train/empathetic_dialogue_train.json.gz",
            1_195,
            27_952 + 1_195,
        ),
        (
            "escot_chain",
            "escot/data/ablation_data/re/empathetic_dialogue_valid.json.gz",
            172,
            4_166,
        ),
        ("smile", "zh_smile/data_slice.tar.gz", 3_600, 41_013),
        ("cpsycoun_d", "zh_cpsycoun/CPsyCounD.tar.gz", 2_930, None),
        ("cpsycoun_e", "zh_cpsycoun/CPsyCounE.tar.gz", 23, None),
        ("dailydialog", "dailydialog/data/dialogues.json.gz", 12_918, 101_424),
        ("annomi", "annomi/AnnoMI-simple.csv.gz", 120, 8_366),
        ("annomi", "annomi/AnnoMI-full.csv.gz", 120, 8_366),
        ("epitome", "epitome/explorations-reddit.csv.gz", 2_744, 5_488),
        ("counselchat", "counselchat/20200325_counsel_chat.csv.gz", 2_116, 4_232),
        # 7 of the 1,471 questions have no answer
        ("counselchat", "counselchat/counselchat-data.csv.gz", 1_464, 2_928),
        ("ed_pairs", "ed_response_pairs/valid_user_system_conv.csv.gz", 2 * 5_632, 4 * 5_632),
        ("ed_pairs", "ed_response_pairs/test_user_system_conv.csv.gz", 2 * 3_780, 4 * 3_780),
        ("pair", "pair/pair_data.csv", 255 * 8, 255 * 16),
        ("empathy_ratings", "empathy_ratings/dataset_and_ratings.csv.gz", 4_800, 9_600),
    ],
)
def test_the_public_files_are_read_whole(corpora, name, file, dialogues, utterances):
    read, dropped = load(name, corpora / file)

    assert len(read) == dialogues == len({dialogue.id for dialogue in read})
    assert utterances in {None, sum(len(dialogue.utterances) for dialogue in read)}
    assert dropped.reasons.keys() <= DROPS.get(name, set())
    if name == "cpsycoun_d":
        assert dropped.reasons.total() == 2
