def picture():
    return ""
